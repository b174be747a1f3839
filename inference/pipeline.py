"""A transformers pipeline as a model of the worker: prepare -> run.

Everything here runs in the model thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.pipelines.base import Pipeline, PipelineException

from config import Settings
from errors import ModelFailed, Rejected, RequestError
from inference.fill_mask import FillMask
from inference.forward import Encoded, position_offset
from inference.ladder import Rung

UNLIMITED = 10**9  # tokenizers without a maximum claim 10**30
CHARACTERS_PER_TOKEN = 100  # no text of a language comes near
SAMPLE_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """One tokenised input and what is to be done with it.

    Attributes:
        encoded: Its tokens.
        postprocess_parameters: Keyword arguments of the postprocessing of this input alone.
        group: Inputs with the same forward parameters carry the same group.
    """

    encoded: Encoded
    postprocess_parameters: Mapping[str, Any]
    group: str = ""

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.encoded.tokens


class Stages(NamedTuple):
    """The parameters of one request, sorted by the stage of the pipeline that takes them."""

    tokenizer_kwargs: Mapping[str, Any]
    postprocess: Mapping[str, Any]


class PipelineModel:
    """A pipeline as the worker wants it (see `batching.Model`).

    Args:
        pipeline: Of a task that tokenises text; not used by anybody else.
        rung: How its model runs batches.
        dtype: The precision of its model.
        settings: Names the model.
    """

    def __init__(self, pipeline: Pipeline, rung: Rung, dtype: str, settings: Settings) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.tokenizer
        self._forward = rung.forward
        self._task = FillMask(pipeline.tokenizer, len(pipeline.tokenizer))
        vocabulary = self._tokenizer.get_vocab()
        self._tokenizer.get_vocab = lambda: vocabulary  # it is built anew for each `targets`
        self._max_tokens = max_input_tokens(pipeline)
        if self._max_tokens is not None:
            self._tokenizer.model_max_length = self._max_tokens  # what truncation cuts to
        self.pads = rung.pads
        self.info: Mapping[str, Any] = {
            "model_id": settings.model_id,
            "revision": settings.revision,
            "task": pipeline.task,
            "architecture": type(pipeline.model).__name__,
            "dtype": dtype,
            "device": str(pipeline.device),
            "max_input_tokens": self._max_tokens,
            "batching": rung.facts,
        }

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> list[PreparedInput | RequestError]:
        """Validate and tokenise (text, parameters) pairs; what does not fit becomes `Rejected`."""
        prepared: dict[int, PreparedInput | RequestError] = {}
        known: dict[int, Stages | Rejected] = {}  # inputs of one request share their parameters
        alike: dict[str, list[tuple[int, str, Stages]]] = {}
        for index, (text, parameters) in enumerate(inputs):
            stages = known.get(id(parameters))
            if stages is None:
                stages = known[id(parameters)] = self._stages(parameters)
            try:
                if isinstance(stages, Rejected):
                    raise stages
                text = self._cut(text, stages.tokenizer_kwargs)
            except Rejected as rejection:
                prepared[index] = rejection
                continue
            key = json.dumps(stages.tokenizer_kwargs) if stages.tokenizer_kwargs else ""
            alike.setdefault(key, []).append((index, text, stages))
        for members in alike.values():
            prepared |= self._tokenised(members)
        return [prepared[index] for index in range(len(inputs))]

    def run(self, batch: Sequence[PreparedInput]) -> list[Any]:
        """Return the pipeline's own output for each of `batch`, or `ModelFailed`.

        A number that is not finite reaches the batch mates in its row, so those without a finite
        answer run once more, alone.
        """
        with torch.inference_mode():
            hidden = self._forward.encode([prepared.encoded for prepared in batch])
            outputs = self._task.answers(
                [(prepared.encoded, prepared.postprocess_parameters) for prepared in batch],
                hidden,
                self._forward.head,
            )
        if len(batch) == 1:
            return outputs
        return [
            self.run([prepared])[0] if isinstance(output, ModelFailed) else output
            for prepared, output in zip(batch, outputs, strict=True)
        ]

    def warm_up(self) -> None:
        """Run a batch of one and of two, so that the first request finds everything allocated."""
        text = f"warm {self._tokenizer.mask_token} up"
        for texts in ([text], [text, f"{text} again"]):
            prepared = self.prepare([(each, {}) for each in texts])
            for output in self.run([item for item in prepared if isinstance(item, PreparedInput)]):
                if isinstance(output, ModelFailed):
                    raise output

    def _stages(self, parameters: Mapping[str, Any]) -> Stages | Rejected:
        """Let the pipeline sort `parameters` by stage."""
        if not parameters:
            return Stages({}, {})
        try:
            preprocess, _, postprocess = self._pipeline._sanitize_parameters(**parameters)
        except (PipelineException, ValueError) as error:
            return Rejected(" ".join(str(error).split()))
        tokenizer_kwargs = preprocess.get("tokenizer_kwargs", {})
        if (
            self._max_tokens is not None
            and tokenizer_kwargs.get("max_length", 0) > self._max_tokens
        ):
            return Rejected(
                f"parameters.tokenizer_kwargs.max_length: must be at most {self._max_tokens}"
            )
        return Stages(tokenizer_kwargs, postprocess)

    def _tokenised(
        self, members: list[tuple[int, str, Stages]]
    ) -> dict[int, PreparedInput | RequestError]:
        """Tokenise texts that have the same tokenizer arguments, in one call."""
        kwargs = members[0][2].tokenizer_kwargs
        encodings = self._tokenizer(
            [text for _, text, _ in members], return_attention_mask=False, **kwargs
        )
        prepared: dict[int, PreparedInput | RequestError] = {}
        for row, (index, _, stages) in enumerate(members):
            features = {name: values[row] for name, values in encodings.items()}
            try:
                tokens = len(features["input_ids"])
                if self._max_tokens is not None and tokens > self._max_tokens:
                    raise self._too_long(f"{tokens} tokens")
                encoded = self._task.encoded(features, stages.postprocess)
                prepared[index] = PreparedInput(encoded, stages.postprocess)
            except Rejected as rejection:
                prepared[index] = rejection
        return prepared

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
        tokens = len(self._tokenizer(sample)["input_ids"]) * len(text) // len(sample)
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
        limits.append(positions - position_offset(config))
    limit = min(limits)
    return limit if limit < UNLIMITED else None
