"""What a client may send for each task, and how the pipeline's answer is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from api.formats import (
    MANY,
    ONE,
    PAIR,
    LabelList,
    OneOrMany,
    Strict,
    TaskFormat,
    Template,
    Text,
    Texts,
    Word,
    body,
    branch,
)
from api.media_tasks import MEDIA_FORMATS
from api.tgi import GenerationParameters, texts


class TokenizerArguments(Strict):
    """What a request may tell the tokenizer."""

    truncation: bool | None = None
    max_length: int | None = Field(None, ge=3, le=1_000_000, description="With the special tokens.")
    add_special_tokens: bool | None = None


class FillMaskParameters(Strict):
    """Parameters of the fill-mask pipeline."""

    top_k: int | None = Field(None, ge=1, description="Answers per mask.")
    targets: (
        Annotated[
            Annotated[Word, Tag(ONE)]
            | Annotated[
                list[Word], Field(min_length=1, max_length=1000, fail_fast=True), Tag(MANY)
            ],
            Discriminator(branch),
        ]
        | None
    ) = Field(None, description="Score these words only.")
    tokenizer_kwargs: TokenizerArguments | None = None


class TextPair(Strict):
    """Two texts that are classified together."""

    text: str
    text_pair: str


class TextClassificationParameters(Strict):
    """Parameters of the text-classification pipeline."""

    top_k: int | None = Field(None, ge=1, description="Labels to return, best first; null: all.")
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="Makes scores of the model's outputs."
    )
    truncation: bool | None = Field(None, description="Cut a text that is too long.")
    max_length: int | None = Field(None, ge=3, le=1_000_000, description="With the special tokens.")


class TokenClassificationParameters(Strict):
    """Parameters of the token-classification pipeline."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None, description="How tokens become entities."
    )
    ignore_labels: list[Word] | None = Field(None, max_length=100, fail_fast=True)
    stride: int | None = Field(
        None, ge=0, le=1_000_000, description="Read a long text in pieces that overlap so far."
    )


class ZeroShotClassificationParameters(Strict):
    """Parameters of the zero-shot-classification pipeline."""

    candidate_labels: LabelList = Field(description="Labels, as a list or separated by commas.")
    multi_label: bool | None = Field(None, description="Several labels can be true.")
    hypothesis_template: Template | None = Field(None, description="With {} for the label.")


class FeatureExtractionParameters(Strict):
    """How texts become vectors."""

    normalize: bool | None = Field(None, description="To length one; default: as the model says.")
    truncate: bool | None = Field(None, description="Cut a text that is too long.")
    truncation_direction: Literal["right", "Right"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Keep so many; the model allows fewer.")
    prompt_name: Word | None = Field(None, description="A prompt of the model's own files.")
    pooling: Literal["mean", "cls", "max", "lasttoken", "none"] | None = Field(
        None, description="none: a vector for each token; default: as the model says."
    )
    encoding_format: Literal["float"] | None = None


class Similarity(Strict):
    """Texts that are compared with one."""

    source_sentence: str
    sentences: list[str] = Field(min_length=1, fail_fast=True)


def labels(output: Any) -> list[dict[str, Any]]:
    """Write zero-shot labels as [{"label", "score"}, …], as inference clients read them."""
    return [
        {"label": label, "score": score}
        for label, score in zip(output["labels"], output["scores"], strict=True)
    ]


def cosines(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Return the cosine of the angle between the first vector and each of the others."""
    array = np.asarray(vectors)
    array /= np.linalg.norm(array, axis=1, keepdims=True).clip(min=1e-12)
    similarities: list[float] = (array[1:] @ array[0]).tolist()
    return similarities


FORMATS: Mapping[str, TaskFormat] = {
    "fill-mask": TaskFormat(
        body("FillMaskBody", OneOrMany, FillMaskParameters),
        examples={
            "one text": {"inputs": "The capital of France is [MASK]."},
            "two answers": {"inputs": "test [MASK]", "parameters": {"top_k": 2}},
        },
    ),
    "text-classification": TaskFormat(
        body(
            "TextClassificationBody",
            Annotated[
                Text
                | Annotated[TextPair, Tag(PAIR)]
                | Annotated[list[str | TextPair], Field(fail_fast=True), Tag(MANY)],
                Discriminator(branch),
            ],
            TextClassificationParameters,
        ),
        wraps=True,
        nullable=frozenset(("top_k",)),
        examples={
            "one text": {"inputs": "I love this."},
            "all labels": {"inputs": "I love this.", "parameters": {"top_k": None}},
        },
    ),
    "token-classification": TaskFormat(
        body("TokenClassificationBody", OneOrMany, TokenClassificationParameters),
        examples={
            "entities": {
                "inputs": "Ada Lovelace lived in London.",
                "parameters": {"aggregation_strategy": "simple"},
            }
        },
    ),
    "zero-shot-classification": TaskFormat(
        body("ZeroShotClassificationBody", OneOrMany, ZeroShotClassificationParameters),
        write=labels,
        examples={
            "topics": {
                "inputs": "The match ended three to two.",
                "parameters": {"candidate_labels": ["sport", "politics"]},
            }
        },
    ),
    "feature-extraction": TaskFormat(
        body(
            "FeatureExtractionBody",
            Annotated[
                Text | Texts | Annotated[Similarity, Tag(PAIR)],
                Discriminator(branch),
            ],
            FeatureExtractionParameters,
            flat=True,
        ),
        wraps=True,
        examples={
            "one text": {"inputs": "A sentence."},
            "similarity": {
                "inputs": {"source_sentence": "A dog runs.", "sentences": ["A hound.", "Tea."]}
            },
        },
    ),
    "text-generation": TaskFormat(
        body(
            "TextGenerationBody",
            OneOrMany,
            GenerationParameters,
            stream=(bool | None, Field(None, description="Answer in pieces, as events.")),
        ),
        write=texts,
        examples={
            "one text": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 20}},
            "drawn": {
                "inputs": "Once upon a time",
                "parameters": {"temperature": 0.7, "top_p": 0.9, "seed": 1},
            },
        },
    ),
    **MEDIA_FORMATS,
}
