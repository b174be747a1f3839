"""Decoded inputs to try a pipeline with: of equal shape, and one of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image
from transformers.pipelines.base import Pipeline

from inference.reading import Example, frames_of

SEED = 5
LABELS = {"candidate_labels": ["cat", "dog"]}
BOXES = [("warm", (0, 0, 500, 500)), ("up", (500, 0, 1000, 500))]
TABLE = {"query": "how many?", "table": {"name": ["a", "b"], "count": ["1", "2"]}}


def examples(pipeline: Pipeline) -> list[Example]:
    """Return inputs for a task: where it takes one medium, the first two have equal shapes."""
    rng = np.random.default_rng(SEED)
    make = MAKERS.get(pipeline.task)
    return make(pipeline, rng) if make else [(image, {}) for image in _images(rng)]


def _images(rng: np.random.Generator) -> list[Image.Image]:
    sizes = ((96, 96), (96, 96), (80, 120))
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def _sounds(pipeline: Pipeline, rng: np.random.Generator) -> list[Example]:
    """Return a second of noise, twice, and half a second."""
    rate_hz = pipeline.feature_extractor.sampling_rate
    lengths = (rate_hz, rate_hz, rate_hz // 2)
    return [(rng.normal(0, 0.1, length).astype(np.float32), {}) for length in lengths]


def _videos(pipeline: Pipeline, rng: np.random.Generator) -> list[Example]:
    shape = (frames_of(pipeline, {}), 64, 64, 3)
    return [(list(rng.integers(0, 256, shape, np.uint8)), {}) for _ in range(2)]


def _labelled_images(_pipeline: Pipeline, rng: np.random.Generator) -> list[Example]:
    return [(image, LABELS) for image in _images(rng)]


def _labelled_sounds(pipeline: Pipeline, rng: np.random.Generator) -> list[Example]:
    return [(sound, LABELS) for sound, _parameters in _sounds(pipeline, rng)]


def _document(_pipeline: Pipeline, rng: np.random.Generator) -> list[Example]:
    return [({"image": _images(rng)[0], "question": "how much?", "word_boxes": BOXES}, {})]


MAKERS: Mapping[str, Callable[[Pipeline, np.random.Generator], list[Example]]] = {
    "audio-classification": _sounds,
    "automatic-speech-recognition": _sounds,
    "zero-shot-audio-classification": _labelled_sounds,
    "zero-shot-image-classification": _labelled_images,
    "zero-shot-object-detection": _labelled_images,
    "video-classification": _videos,
    "document-question-answering": _document,
    "keypoint-matching": lambda _pipeline, rng: [(_images(rng)[1:], {})],
    "mask-generation": lambda _pipeline, rng: [(_images(rng)[0], {"points_per_crop": 2})],
    "table-question-answering": lambda _pipeline, _rng: [(dict(TABLE), {})],
    "text-to-audio": lambda _pipeline, _rng: [("warm up", {})],
}
