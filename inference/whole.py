"""Tasks that leave each input to the pipeline: images, sounds, documents, tables, speech.

Runs in the model thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers.pipelines.base import Pipeline, PipelineException

from errors import Rejected, RequestError
from inference.memory import DeviceMemory
from inference.reading import Example, read
from inference.writing import written
from model import Spent

logger = logging.getLogger(__name__)

REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Whole:
    """One input.

    Attributes:
        value: As the client sent it.
        parameters: As the client sent them.
        group: Its own.
        tokens: One.
    """

    value: Any
    parameters: Mapping[str, Any]
    group: str
    tokens: int = 1


class OneByOne:
    """A pipeline as the worker wants it (see `model.Model`): each input alone.

    No input waits for another's answer, and all that a batch holds is what clients sent.

    Args:
        pipeline: Not used by anybody else.
        about: Facts for /info.
    """

    pads = False

    def __init__(self, pipeline: Pipeline, about: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._numbers = count()
        self.info = about
        self.spent = Spent(0.0, 0)
        self.memory = DeviceMemory(str(pipeline.device))

    def prepare(self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[Whole]:
        """Put each input in a group of its own."""
        return [Whole(value, parameters, str(next(self._numbers))) for value, parameters in inputs]

    def run(self, batch: Sequence[Whole]) -> list[Any]:
        """Return the pipeline's own output for each of `batch`, or why there is none."""
        started = time.perf_counter()
        outputs = [or_refusal(self._answer, each) for each in batch]
        self.spent = Spent(time.perf_counter() - started, len(batch))
        return outputs

    def warm_up(self, tries: Sequence[Example]) -> None:
        """Answer a decoded input.

        Raises:
            RequestError: The model cannot.
        """
        outcome = or_refusal(self._called, *tries[0])
        if isinstance(outcome, RequestError):
            raise outcome

    def _answer(self, whole: Whole) -> Any:
        return self._called(*read(self._pipeline, whole.value, whole.parameters))

    def _called(self, value: Any, parameters: Mapping[str, Any]) -> Any:
        with torch.inference_mode():
            output = self._pipeline(value, **parameters)
        return written(self._pipeline.task, output, parameters)


def or_refusal(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns, or why it refuses its input.

    A pipeline says with ValueError what is wrong with an input or a parameter.
    """
    try:
        return function(*arguments)
    except RequestError as refusal:
        return refusal
    except (PipelineException, ValueError) as error:
        logger.debug("refused", exc_info=error)
        return Rejected(" ".join(str(error).split())[:REASON_CHARACTERS])
