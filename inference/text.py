"""Tasks on text: what each asks of the tokenizer and of the encoder, and how it writes answers.

A value becomes one text or several, a text one or several sequences of tokens, and of each sequence
the task wants the outputs at some positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from transformers.pipelines.base import Pipeline, PipelineException

from errors import ModelFailed, Rejected
from inference.blocks import Encoded

Text: TypeAlias = str | tuple[str, str]  # or a pair
Head: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Stages(NamedTuple):
    """The parameters of one request, sorted by the stage that takes them.

    Attributes:
        texts: For `TextTask.texts`.
        tokenizer: Arguments of the tokenizer.
        answer: For `TextTask.encoded` and `TextTask.answers`.
    """

    texts: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """One tokenised input and what is to be done with it.

    Attributes:
        value: As the client sent it.
        sequences: Its tokens.
        parameters: Those of `Stages.answer`, of this input alone.
        group: Any may run with any other.
    """

    value: Any
    sequences: Sequence[Encoded]
    parameters: Mapping[str, Any]
    group: ClassVar[str] = ""

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return sum(encoded.tokens for encoded in self.sequences)


class TextTask(ABC):
    """What a task adds to tokenising and to the forward pass; its answers are the pipeline's.

    Args:
        pipeline: Of the task.

    Attributes:
        truncation: How a client asks for truncation; empty: it is always done.
        everywhere: Outputs are wanted at any position, not at the first alone.
    """

    truncation = "set parameters.truncation to true to cut it"
    everywhere = False

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.tokenizer = pipeline.tokenizer

    @property
    def example(self) -> tuple[Any, Mapping[str, Any]]:
        """An input to warm up with, and its parameters."""
        return "warm up", {}

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts for /info."""
        return {}

    def stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Let the pipeline sort `parameters` by stage.

        Raises:
            Rejected: It takes offence at one.
        """
        try:
            preprocess, _, postprocess = self.pipeline._sanitize_parameters(**parameters)
        except (PipelineException, ValueError, KeyError) as error:
            raise Rejected(" ".join(str(error).split())) from None
        return Stages({}, preprocess, postprocess)

    def texts(self, value: Any, _parameters: Mapping[str, Any]) -> Sequence[Text]:
        """Return what is to be tokenised of `value`.

        Raises:
            Rejected: It does not go with the parameters.
        """
        return [value]

    def encoded(self, features: Mapping[str, Any], _parameters: Mapping[str, Any]) -> Encoded:
        """Return one tokenised text with the positions whose outputs are wanted.

        Raises:
            Rejected: It does not go with the parameters.
        """
        return Encoded(features, range(len(features["input_ids"])) if self.everywhere else [0])

    @abstractmethod
    def answers(
        self, batch: Sequence[PreparedInput], hidden: torch.Tensor, head: Head
    ) -> list[Any]:
        """Return the pipeline's answer, or `ModelFailed`, for each of `batch`.

        Args:
            batch: What was prepared.
            hidden: At all that is wanted of it, in order: [positions, width].
            head: Makes outputs of `hidden`.
        """


class PerInputTask(TextTask):
    """A task that writes the answer to each input by itself."""

    def answers(
        self, batch: Sequence[PreparedInput], hidden: torch.Tensor, head: Head
    ) -> list[Any]:
        """Give each input its part of the outputs."""
        outputs = head(hidden).float().cpu()
        sequences = chain.from_iterable(each.sequences for each in batch)
        parts = iter(torch.split(outputs, [len(encoded.wanted) for encoded in sequences]))
        return [self._answered(each, [next(parts) for _ in each.sequences]) for each in batch]

    def _answered(self, prepared: PreparedInput, outputs: list[torch.Tensor]) -> Any:
        if not all(bool(part.isfinite().all()) for part in outputs):
            return ModelFailed("the model gave no finite numbers for this input")
        return self.answer(prepared, outputs)

    @abstractmethod
    def answer(self, prepared: PreparedInput, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the answer to one input.

        Args:
            prepared: The input.
            outputs: Of each of its sequences: [wanted, outputs], float32.
        """
