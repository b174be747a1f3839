"""Inputs of equal shape stacked for one forward pass, where that is proved right at load.

Runs in the model thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.pipelines.base import Pipeline
from transformers.utils import ModelOutput

from errors import RequestError
from inference.heads import FAULTS, reason_of
from inference.memory import DeviceMemory
from inference.reading import Example, preprocess, read
from inference.whole import or_refusal
from inference.writing import written
from model import Spent
from stages import groups

logger = logging.getLogger(__name__)

TASKS = frozenset(
    (
        *("image-classification", "image-segmentation", "object-detection", "depth-estimation"),
        *("image-feature-extraction", "video-classification", "audio-classification"),
    )
)
VALUES_PER_TOKEN = 512  # so that MAX_BATCH_TOKENS bounds the memory of a batch
TOLERANCE = 1e-4  # of the largest number of an output, in float32
SIZE = "target_size"  # of the image that came; the pipeline hands it past the model

Tree: TypeAlias = Any  # tensors in mappings and tuples


@dataclass(frozen=True, slots=True)
class Stackable:
    """One input that the pipeline preprocessed.

    Attributes:
        tensors: For the model: each [1, …].
        size: Of the image that came, as the pipeline has it.
        parameters: As the client sent them.
        postprocess: Those of them that make the answer.
        group: Inputs of equal shapes share it.
        tokens: What it takes of the memory of a batch.
    """

    tensors: Mapping[str, torch.Tensor]
    size: Any
    parameters: Mapping[str, Any]
    postprocess: Mapping[str, Any]
    group: str
    tokens: int


class Stacked:
    """A pipeline as the worker wants it (see `model.Model`): equal shapes in one forward pass.

    Args:
        pipeline: Not used by anybody else; its forward pass has no parameters.
        about: Facts for /info.
    """

    pads = False

    def __init__(self, pipeline: Pipeline, about: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self.info = about
        self.spent = Spent(0.0, 0)
        self.memory = DeviceMemory(str(pipeline.device))

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> list[Stackable | RequestError]:
        """Decode and preprocess; what cannot be becomes `Rejected`."""
        return [or_refusal(self._read, *each) for each in inputs]

    def run(self, batch: Sequence[Stackable]) -> list[Any]:
        """Return the pipeline's own output for each of `batch`, or why there is none."""
        started = time.perf_counter()
        outputs = self.outputs(batch)
        self.spent = Spent(time.perf_counter() - started, sum(each.tokens for each in batch))
        return [
            or_refusal(self._answer, each, output)
            for each, output in zip(batch, outputs, strict=True)
        ]

    def warm_up(self, tries: Sequence[Example]) -> None:
        """Answer two decoded inputs.

        Raises:
            RequestError: The model cannot.
        """
        for outcome in self.run([self.preprocessed(*each) for each in tries[:2]]):
            if isinstance(outcome, RequestError):
                raise outcome

    def preprocessed(self, value: Any, parameters: Mapping[str, Any]) -> Stackable:
        """Return what the model needs of a decoded input.

        Raises:
            ValueError: The pipeline takes offence at a parameter, or needs more than tensors.
        """
        before, _, after = self._pipeline._sanitize_parameters(**parameters)
        with torch.inference_mode():
            features = dict(preprocess(self._pipeline, value, before))
        size = features.pop(SIZE, None)
        if not all(torch.is_tensor(each) and each.shape[:1] == (1,) for each in features.values()):
            raise ValueError(f"not one tensor each: {', '.join(features)}")
        return Stackable(
            features,
            size,
            parameters,
            {**self._pipeline._postprocess_params, **after},
            group=str({name: tuple(each.shape) for name, each in features.items()}),
            tokens=1 + sum(each.numel() for each in features.values()) // VALUES_PER_TOKEN,
        )

    def outputs(self, batch: Sequence[Stackable]) -> list[Tree]:
        """Return the model's outputs for each of `batch`, which have equal shapes."""
        inputs: dict[str, Any] = {
            name: torch.cat([each.tensors[name] for each in batch]) for name in batch[0].tensors
        }
        if batch[0].size is not None:
            inputs[SIZE] = None
        with torch.inference_mode():
            outputs = self._pipeline.forward(inputs)
        parts = [part(outputs, index, len(batch)) for index in range(len(batch))]
        for own, each in zip(parts, batch, strict=True):
            if each.size is not None:
                own[SIZE] = each.size
        return parts

    def _read(self, value: Any, parameters: Mapping[str, Any]) -> Stackable:
        return self.preprocessed(*read(self._pipeline, value, parameters))

    def _answer(self, prepared: Stackable, output: Tree) -> Any:
        with torch.inference_mode():
            answer = self._pipeline.postprocess(output, **prepared.postprocess)
        return written(self._pipeline.task, answer, prepared.parameters)


def proved(pipeline: Pipeline, tries: Sequence[Example]) -> dict[str, Any]:
    """Tell how inputs run: stacked, if the outputs are those of the untouched pipeline.

    Args:
        pipeline: In float32.
        tries: Decoded inputs, some of equal shape.
    """
    try:
        with torch.inference_mode():
            expected = [
                pipeline.forward(preprocess(pipeline, value, {})) for value, _parameters in tries
            ]
        difference = max(map(_difference, stacked(pipeline, tries), expected))
    except FAULTS as fault:
        reason = reason_of(fault)
    else:
        if difference <= TOLERANCE:
            return {"path": "stacked", "largest_difference": difference, "refused": {}}
        reason = f"differs by {difference:.1e}, more than {TOLERANCE:.0e}"
    return {"path": "one by one", "refused": {"stacked": reason}}


def stacked(pipeline: Pipeline, tries: Sequence[Example]) -> list[Tree]:
    """Return the model's outputs for decoded inputs, those of equal shape stacked."""
    model = Stacked(pipeline, {})
    prepared = [model.preprocessed(*each) for each in tries]
    found: dict[int, Tree] = {}
    for members in groups(prepared, sys.maxsize, pads=False):
        outputs = model.outputs([prepared[index] for index in members])
        found |= zip(members, outputs, strict=True)
    return [found[index] for index in range(len(tries))]


def numbers(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output, in float32."""
    if torch.is_tensor(tree):
        yield tree.float()
    elif isinstance(tree, Mapping):
        for name, each in tree.items():
            if name != SIZE:
                yield from numbers(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from numbers(each)


def _difference(actual: Tree, expected: Tree) -> float:
    """Return the largest difference, in units of the largest number where that is above 1."""
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1))
        for one, other in zip(numbers(actual), numbers(expected), strict=True)
    )


def part(tree: Tree, index: int, count: int) -> Tree:
    """Return what an output for `count` inputs says of one of them.

    Raises:
        ValueError: A tensor has not one row for each: it could have by chance.
    """
    if torch.is_tensor(tree):
        if tree.shape[:1] != (count,):
            raise ValueError(f"an output of shape {tuple(tree.shape)} for {count} inputs")
        return tree[index : index + 1]
    if isinstance(tree, Mapping):
        return ModelOutput({name: part(each, index, count) for name, each in tree.items()})
    if isinstance(tree, list | tuple):
        return type(tree)(part(each, index, count) for each in tree)
    return tree
