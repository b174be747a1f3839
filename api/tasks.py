"""What a client may send for each task, and how the pipeline's answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

LABELS = 100  # candidates of one request, each a pass over the text
ONE, MANY, PAIR = "<one>", "<many>", "<pair>"


def branch(value: Any) -> str:
    """Name the branch of a union that `value` is for, so that errors speak of that branch alone."""
    if isinstance(value, list):
        return MANY
    return PAIR if isinstance(value, dict) else ONE


class Strict(BaseModel):
    """Knows every key, and takes no value for another."""

    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Tag(ONE)]
Texts = Annotated[list[str], Field(fail_fast=True), Tag(MANY)]
OneOrMany = Annotated[Text | Texts, Discriminator(branch)]
Word = Annotated[str, Field(max_length=200)]


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

    candidate_labels: Annotated[
        Annotated[str, Field(min_length=1, max_length=20_000), Tag(ONE)]
        | Annotated[list[Word], Field(min_length=1, max_length=LABELS, fail_fast=True), Tag(MANY)],
        Discriminator(branch),
    ] = Field(description="Labels, as a list or separated by commas.")
    multi_label: bool | None = Field(None, description="Several labels can be true.")
    # Other fields would let a client format at will: widths of gigabytes, attributes of objects.
    hypothesis_template: str | None = Field(
        None, max_length=1000, pattern=r"^[^{}]*\{\}[^{}]*$", description="With {} for the label."
    )


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


def as_it_is(output: Any) -> Any:
    """Write an output as the pipeline does."""
    return output


@dataclass(frozen=True, slots=True)
class TaskFormat:
    """The wire format of a task.

    Attributes:
        body: Of a JSON request: inputs, parameters, options.
        wraps: A single input in JSON is answered with a list of one, as clients expect.
        write: Makes of an output what JSON clients expect.
        nullable: Parameters for which null is a value.
        flat: Names of parameters that may stand beside `inputs`.
        examples: Requests that show what it is good for, by title.
    """

    body: type[BaseModel]
    wraps: bool = False
    write: Callable[[Any], Any] = as_it_is
    nullable: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def body(name: str, inputs: Any, parameters: Any, *, flat: bool = False) -> type[BaseModel]:
    """Return the model of a JSON body.

    Args:
        name: In the OpenAPI document.
        inputs: Type of `inputs`.
        parameters: Type of `parameters`.
        flat: The fields of `parameters` may stand beside `inputs` too.
    """
    fields: dict[str, Any] = {
        "inputs": (inputs, ...),
        "parameters": (parameters, ...) if _required(parameters) else (parameters | None, None),
        "options": (Any, Field(None, description="Ignored; older clients send it.")),
    }
    if flat:
        fields |= {
            field_name: (about.annotation, about)
            for field_name, about in parameters.model_fields.items()
        }
    return create_model(name, __base__=Strict, **fields)


def _required(parameters: type[BaseModel]) -> bool:
    return any(about.is_required() for about in parameters.model_fields.values())


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
        flat=frozenset(FeatureExtractionParameters.model_fields),
        examples={
            "one text": {"inputs": "A sentence."},
            "similarity": {
                "inputs": {"source_sentence": "A dog runs.", "sentences": ["A hound.", "Tea."]}
            },
        },
    ),
}
