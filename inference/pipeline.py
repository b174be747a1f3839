"""A transformers pipeline as a model of the worker: prepare -> run.

Everything here runs in the model thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.pipelines.base import Pipeline, PipelineException, pad_collate_fn

from config import Settings
from errors import Rejected, RequestError
from inference import fill_mask

UNLIMITED = 10**9  # tokenizers without a maximum claim 10**30
CHARACTERS_PER_TOKEN = 100  # no text of a language comes near
SAMPLE_CHARACTERS = 10_000

# These count positions from pad_token_id + 1: fewer tokens fit than there are position embeddings.
OFFSET_POSITIONS = frozenset(
    (
        "camembert",
        "data2vec-text",
        "ibert",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    )
)


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """One tokenised input and what is to be done with it.

    Attributes:
        features: Model inputs, int64 tensors [1, tokens].
        tokens: Length in tokens.
        group: Inputs with the same forward parameters carry the same group.
        forward_parameters: Keyword arguments of the forward pass.
        postprocess_parameters: Keyword arguments of the postprocessing of this input alone.
    """

    features: Mapping[str, torch.Tensor]
    tokens: int
    group: str
    forward_parameters: Mapping[str, Any]
    postprocess_parameters: Mapping[str, Any]


class Stages(NamedTuple):
    """The parameters of one request, sorted by the stage of the pipeline that takes them."""

    preprocess: Mapping[str, Any]
    forward: Mapping[str, Any]
    postprocess: Mapping[str, Any]


class PipelineModel:
    """A pipeline as the worker wants it (see `batching.Model`).

    Args:
        pipeline: Of a task that tokenises text; not used by anybody else.
        settings: Names the model.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline = pipeline
        self._collate = pad_collate_fn(pipeline.tokenizer, None)
        vocabulary = pipeline.tokenizer.get_vocab()
        pipeline.tokenizer.get_vocab = lambda: vocabulary  # it is built anew for each `targets`
        self._max_tokens = max_input_tokens(pipeline)
        if self._max_tokens is not None:
            pipeline.tokenizer.model_max_length = self._max_tokens  # what truncation cuts to
        self.info: Mapping[str, Any] = {
            "model_id": settings.model_id,
            "revision": settings.revision,
            "task": pipeline.task,
            "architecture": type(pipeline.model).__name__,
            "dtype": str(pipeline.model.dtype).removeprefix("torch."),
            "device": str(pipeline.device),
            "max_input_tokens": self._max_tokens,
        }

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> list[PreparedInput | RequestError]:
        """Validate and tokenise (text, parameters) pairs; what does not fit becomes `Rejected`."""
        prepared: list[PreparedInput | RequestError] = []
        known: dict[int, Stages] = {}  # the inputs of one request share their parameters
        for text, parameters in inputs:
            try:
                if id(parameters) not in known:
                    known[id(parameters)] = self._stages(parameters)
                prepared.append(self._prepare(text, known[id(parameters)]))
            except Rejected as rejection:
                prepared.append(rejection)
            except (PipelineException, ValueError) as error:
                prepared.append(Rejected(" ".join(str(error).split())))
        return prepared

    def run(self, batch: Sequence[PreparedInput]) -> list[Any]:
        """Return the pipeline's own output for each of `batch`, in one padded forward pass."""
        padded = self._collate([prepared.features for prepared in batch])
        outputs = self._pipeline.forward(padded, **batch[0].forward_parameters)
        return [
            self._pipeline.postprocess(
                {name: tensor[row : row + 1] for name, tensor in outputs.items()},
                **prepared.postprocess_parameters,
            )
            for row, prepared in enumerate(batch)
        ]

    def warm_up(self) -> None:
        """Run a batch of one and of two, so that the first request finds everything allocated."""
        text = f"warm {self._pipeline.tokenizer.mask_token} up"
        for texts in ([text], [text, f"{text} again"]):
            prepared = self.prepare([(each, {}) for each in texts])
            self.run([item for item in prepared if isinstance(item, PreparedInput)])

    def _stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Let the pipeline sort `parameters` by stage, with its own defaults below them."""
        preprocess, forward, postprocess = self._pipeline._sanitize_parameters(**parameters)
        self._check_max_length(preprocess.get("tokenizer_kwargs", {}))
        return Stages(
            {**self._pipeline._preprocess_params, **preprocess},
            {**self._pipeline._forward_params, **forward},
            {**self._pipeline._postprocess_params, **postprocess},
        )

    def _prepare(self, text: str, stages: Stages) -> PreparedInput:
        text = self._cut(text, stages.preprocess.get("tokenizer_kwargs", {}))
        features = self._pipeline.preprocess(text, **stages.preprocess)
        tokens = features["input_ids"].shape[1]
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise self._too_long(f"{tokens} tokens")
        fill_mask.check_answers(self._pipeline, features["input_ids"], stages.postprocess)
        group = json.dumps(stages.forward, sort_keys=True, default=repr) if stages.forward else ""
        return PreparedInput(features, tokens, group, stages.forward, stages.postprocess)

    def _check_max_length(self, tokenizer_kwargs: Mapping[str, Any]) -> None:
        max_length = tokenizer_kwargs.get("max_length", 0)
        if self._max_tokens is not None and max_length > self._max_tokens:
            raise Rejected(
                f"parameters.tokenizer_kwargs.max_length: must be at most {self._max_tokens}"
            )

    def _cut(self, text: str, tokenizer_kwargs: Mapping[str, Any]) -> str:
        """Return the part of `text` that can matter: to tokenise megabytes takes seconds.

        Raises:
            Rejected: It is far too long, and truncation is not asked for.
        """
        if self._max_tokens is None or len(text) <= self._max_tokens * CHARACTERS_PER_TOKEN:
            return text
        head = text[: self._max_tokens * CHARACTERS_PER_TOKEN]
        if tokenizer_kwargs.get("truncation", "max_length" in tokenizer_kwargs):
            return head
        sample = head[:SAMPLE_CHARACTERS]
        tokens = len(self._pipeline.tokenizer(sample)["input_ids"]) * len(text) // len(sample)
        raise self._too_long(f"about {tokens} tokens")

    def _too_long(self, size: str) -> Rejected:
        return Rejected(
            f"the input has {size}, and {self._max_tokens} fit; "
            'set parameters.tokenizer_kwargs to {"truncation": true} to cut it'
        )


def max_input_tokens(pipeline: Pipeline) -> int | None:
    """Return how many tokens the model takes, or None where nothing limits them."""
    config = pipeline.model.config
    limits = [pipeline.tokenizer.model_max_length]
    if positions := getattr(config, "max_position_embeddings", None):
        offset = config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
        limits.append(positions - offset)
    limit = min(limits)
    return limit if limit < UNLIMITED else None
