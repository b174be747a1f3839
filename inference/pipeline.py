"""A transformers pipeline as a model of the worker: prepare -> run.

Everything here runs in the model thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.pipelines.base import Pipeline

from errors import ModelFailed, Rejected, RequestError
from inference.blocks import position_offset
from inference.ladder import Rung
from inference.memory import DeviceMemory
from inference.text import PreparedInput, Stages, Text, TextTask
from model import Spent

UNLIMITED = 10**9  # tokenizers without a maximum claim 10**30
CHARACTERS_PER_TOKEN = 100  # no text of a language comes near
SAMPLE_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class _Input:
    """One input on its way to the tokenizer: its place in the batch, and its parameters."""

    index: int
    value: Any
    texts: Sequence[Text]
    stages: Stages


class PipelineModel:
    """A pipeline as the worker wants it (see `model.Model`).

    Args:
        task: With its pipeline, which is not used by anybody else.
        rung: How its model runs batches.
        max_tokens: Of one sequence; None: nothing limits them.
        max_batch_tokens: Of an input that has several sequences.
        about: Facts for /info.
    """

    def __init__(
        self,
        task: TextTask,
        rung: Rung,
        max_tokens: int | None,
        max_batch_tokens: int,
        about: Mapping[str, Any],
    ) -> None:
        self._task = task
        self._tokenizer = task.tokenizer
        self._forward = rung.forward
        self._max_tokens = max_tokens
        self._max_batch_tokens = max_batch_tokens
        if max_tokens is not None:
            self._tokenizer.model_max_length = max_tokens  # what truncation cuts to
        self.pads = rung.pads
        self.spent = Spent(0.0, 0)
        self.memory = DeviceMemory(about["device"])
        self.info: Mapping[str, Any] = {
            **about,
            "max_input_tokens": max_tokens,
            "batching": rung.facts,
        }

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> list[PreparedInput | RequestError]:
        """Validate and tokenise (value, parameters) pairs; what does not fit becomes `Rejected`."""
        prepared: dict[int, PreparedInput | RequestError] = {}
        known: dict[int, Stages | Rejected] = {}  # inputs of one request share their parameters
        alike: dict[str, list[_Input]] = {}
        for index, (value, parameters) in enumerate(inputs):
            stages = known.get(id(parameters))
            if stages is None:
                stages = known[id(parameters)] = self._stages(parameters)
            try:
                if isinstance(stages, Rejected):
                    raise stages
                texts = [
                    self._cut(text, stages.tokenizer)
                    for text in self._task.texts(value, stages.texts)
                ]
            except Rejected as rejection:
                prepared[index] = rejection
                continue
            key = json.dumps(stages.tokenizer) if stages.tokenizer else ""
            alike.setdefault(key, []).append(_Input(index, value, texts, stages))
        for members in alike.values():
            prepared |= self._tokenised(members)
        return [prepared[index] for index in range(len(inputs))]

    def run(self, batch: Sequence[PreparedInput]) -> list[Any]:
        """Return the pipeline's own output for each of `batch`, or `ModelFailed`.

        A number that is not finite reaches the batch mates in its row, so those without a finite
        answer run once more, alone.
        """
        self._forward_s, self._computed_tokens = 0.0, 0
        outputs = self._run(batch)
        if len(batch) > 1:
            outputs = [
                self._run([prepared])[0] if isinstance(output, ModelFailed) else output
                for prepared, output in zip(batch, outputs, strict=True)
            ]
        self.spent = Spent(self._forward_s, self._computed_tokens)
        return outputs

    def _run(self, batch: Sequence[PreparedInput]) -> list[Any]:
        sequences = [encoded for prepared in batch for encoded in prepared.sequences]
        with torch.inference_mode():
            hidden = self._timed(self._forward.encode, sequences)
            self._computed_tokens += self._forward.computed_tokens
            return self._task.answers(batch, hidden, partial(self._timed, self._forward.head))

    def _timed(self, function: Callable[..., torch.Tensor], argument: Any) -> torch.Tensor:
        """Call a part of the forward pass, and wait for it where it runs on another device."""
        started = time.perf_counter()
        tensor = function(argument)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        self._forward_s += time.perf_counter() - started
        return tensor

    def warm_up(self) -> None:
        """Run a batch of one and of two, so that the first request finds everything allocated.

        Raises:
            RequestError: The task's own example cannot be answered.
        """
        for count in (1, 2):
            prepared = self.prepare([self._task.example] * count)
            valid = [each for each in prepared if isinstance(each, PreparedInput)]
            for outcome in (*prepared, *self.run(valid)):
                if isinstance(outcome, RequestError):
                    raise outcome

    def _stages(self, parameters: Mapping[str, Any]) -> Stages | Rejected:
        """Sort `parameters` by stage."""
        try:
            stages = self._task.stages(parameters)
        except Rejected as rejection:
            return rejection
        longest = stages.tokenizer.get("max_length", 0)
        if self._max_tokens is not None and longest > self._max_tokens:
            return Rejected(f"parameters: max_length must be at most {self._max_tokens}")
        return stages

    def _tokenised(self, members: Sequence[_Input]) -> dict[int, PreparedInput | RequestError]:
        """Tokenise inputs that have the same tokenizer arguments, in one call."""
        arguments = members[0].stages.tokenizer
        encodings = self._tokenizer(
            [text for member in members for text in member.texts],
            return_attention_mask=False,
            **arguments,
        )
        texts = sum(len(member.texts) for member in members)
        # With a stride a long text has several rows.
        text_of_row = encodings.pop("overflow_to_sample_mapping", range(texts))
        rows: list[list[dict[str, Any]]] = [[] for _ in range(texts)]
        for row, text in enumerate(text_of_row):
            rows[text].append({name: values[row] for name, values in encodings.items()})
        found = iter(rows)
        prepared: dict[int, PreparedInput | RequestError] = {}
        for member in members:
            sequences = [features for _ in member.texts for features in next(found)]
            try:
                prepared[member.index] = self._checked(member, sequences)
            except Rejected as rejection:
                prepared[member.index] = rejection
        return prepared

    def _checked(self, member: _Input, sequences: Sequence[dict[str, Any]]) -> PreparedInput:
        """Return an input with its tokens.

        Raises:
            Rejected: They are too many, or not what the task needs.
        """
        lengths = [len(features["input_ids"]) for features in sequences]
        if self._max_tokens is not None and max(lengths) > self._max_tokens:
            raise self._too_long(f"{max(lengths)} tokens")
        if len(lengths) > 1 and sum(lengths) > self._max_batch_tokens:
            raise Rejected(
                f"the input asks for {sum(lengths)} tokens in all, "
                f"and a batch holds {self._max_batch_tokens}"
            )
        parameters = member.stages.answer
        encoded = [self._task.encoded(features, parameters) for features in sequences]
        return PreparedInput(member.value, encoded, parameters)

    def _cut(self, text: Text, arguments: Mapping[str, Any]) -> Text:
        """Return the part of `text` that can matter: to tokenise megabytes takes seconds.

        Raises:
            Rejected: It is far too long, and truncation is not asked for.
        """
        if isinstance(text, tuple):
            return self._cut_one(text[0], arguments), self._cut_one(text[1], arguments)
        return self._cut_one(text, arguments)

    def _cut_one(self, text: str, arguments: Mapping[str, Any]) -> str:
        if self._max_tokens is None or len(text) <= self._max_tokens * CHARACTERS_PER_TOKEN:
            return text
        head = text[: self._max_tokens * CHARACTERS_PER_TOKEN]
        if "stride" not in arguments and arguments.get("truncation", "max_length" in arguments):
            return head
        sample = head[:SAMPLE_CHARACTERS]
        tokens = len(self._tokenizer(sample)["input_ids"]) * len(text) // len(sample)
        raise self._too_long(f"about {tokens} tokens")

    def _too_long(self, size: str) -> Rejected:
        text = f"the input has {size}, and {self._max_tokens} fit"
        hint = self._task.truncation
        return Rejected(f"{text}; {hint}" if hint else text)


def max_input_tokens(pipeline: Pipeline) -> int | None:
    """Return how many tokens the model takes, or None where nothing limits them."""
    config = pipeline.model.config
    limits = [pipeline.tokenizer.model_max_length]
    if positions := getattr(config, "max_position_embeddings", None):
        limits.append(positions - position_offset(config))
    limit = min(limits)
    return limit if limit < UNLIMITED else None
