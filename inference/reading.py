"""From what a client sent to what a pipeline takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.pipelines.base import Pipeline

import media
from errors import Rejected

Parameters: TypeAlias = dict[str, Any]
Example: TypeAlias = tuple[Any, Mapping[str, Any]]
Reader: TypeAlias = Callable[[Pipeline, Any, Parameters], Any]

WHOLE_S = 60  # longer speech is read in pieces, for attention grows with the square of it
PIECE_S = 30
FRAMES = 16
PIECES = 64  # of a document
SPECIAL_TOKENS = 4
USUAL_OVERLAP = 256  # of the pipeline, or half a piece


def read(pipeline: Pipeline, value: Any, parameters: Mapping[str, Any]) -> Example:
    """Decode `value`; return it with the parameters that are left for the pipeline.

    Raises:
        Rejected: It cannot be decoded.
    """
    left = dict(parameters)
    reader: Reader = READERS.get(pipeline.task, _image)
    return reader(pipeline, value, left), left


def preprocess(pipeline: Pipeline, value: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the pipeline's own preprocessing makes of a decoded value.

    It takes a video by its path alone, so its frames go to its processor here.
    """
    features: Any
    if pipeline.task != "video-classification":
        features = pipeline.preprocess(value, **parameters)
    elif (processor := pipeline.video_processor) is not None:
        features = processor(np.stack(value), do_sample_frames=False, return_tensors="pt")
    else:
        features = pipeline.image_processor(value, return_tensors="pt")
    return dict(features.to(pipeline.dtype))


def frames_of(pipeline: Pipeline, parameters: Mapping[str, Any]) -> int:
    """Return how many frames of a video the model is to see."""
    return int(parameters.get("num_frames", getattr(pipeline.model.config, "num_frames", FRAMES)))


def _image(_pipeline: Pipeline, value: bytes, _parameters: Parameters) -> Any:
    return media.image(value)


def _sound(pipeline: Pipeline, value: bytes, _parameters: Parameters) -> Any:
    return media.audio(value, pipeline.feature_extractor.sampling_rate)


def _speech(pipeline: Pipeline, value: bytes, parameters: Parameters) -> Any:
    """Decode speech; what is long is read in pieces, but by a model that does so itself."""
    samples = _sound(pipeline, value, parameters)
    long = len(samples) > WHOLE_S * pipeline.feature_extractor.sampling_rate
    if long and pipeline.type.startswith("ctc"):
        parameters.setdefault("chunk_length_s", PIECE_S)
    chunk_s, stride_s = (parameters.get(f"{name}_length_s", 0) for name in ("chunk", "stride"))
    if chunk_s and 4 * stride_s > chunk_s:  # each overlap is computed twice
        raise Rejected("parameters.stride_length_s: at most a quarter of chunk_length_s")
    return samples


def _video(pipeline: Pipeline, value: bytes, parameters: Parameters) -> Any:
    step = parameters.get("frame_sampling_rate", 1)
    return media.video(value, frames_of(pipeline, parameters), step)


def _pair(_pipeline: Pipeline, value: Mapping[str, Any], _parameters: Parameters) -> Any:
    return [media.image(each) for each in value["images"]]


def _document(pipeline: Pipeline, value: Mapping[str, Any], parameters: Parameters) -> Any:
    boxes = parameters.pop("word_boxes", value.get("word_boxes"))
    if isinstance(pipeline.tokenizer, PreTrainedTokenizerFast):  # else a model sees it as a whole
        _bound_pieces(pipeline.tokenizer, value["question"], boxes or (), parameters)
    document = {"image": media.image(value["image"]), "question": value["question"]}
    return document if boxes is None else {**document, "word_boxes": boxes}


def _bound_pieces(
    tokenizer: PreTrainedTokenizerFast,
    question: str,
    boxes: Sequence[tuple[str, Any]],
    parameters: Parameters,
) -> None:
    """Bound the passes over a long document, which is read in pieces that overlap.

    Raises:
        Rejected: There would be very many.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    asked, read = (
        sum(len(each.ids) for each in backend.encode_batch(texts, add_special_tokens=False))
        for texts in ([question], [word for word, _box in boxes])
    )
    width = min(parameters.get("max_seq_len", sys.maxsize), tokenizer.model_max_length)
    room = width - asked - SPECIAL_TOKENS
    if room < 2:
        raise Rejected("the question leaves no room for the document")
    usual = min(width // 2, USUAL_OVERLAP, room * 3 // 4)
    overlap = parameters.setdefault("doc_stride", usual)
    if 4 * overlap > 3 * room:
        raise Rejected("parameters.doc_stride: at most three quarters of what a piece holds")
    if read > PIECES * (room - overlap):
        raise Rejected(f"word_boxes: {read} tokens, and {PIECES * (room - overlap)} fit")


def _table(_pipeline: Pipeline, value: Mapping[str, Any], _parameters: Parameters) -> Any:
    return dict(value)  # the pipeline makes a frame of the table, in place


def _text(_pipeline: Pipeline, value: str, parameters: Parameters) -> Any:
    given = {name: parameters.pop(name) for name in list(parameters)}
    parameters["generate_kwargs"] = given
    return value


READERS: Mapping[str, Reader] = {
    "audio-classification": _sound,
    "zero-shot-audio-classification": _sound,
    "automatic-speech-recognition": _speech,
    "video-classification": _video,
    "keypoint-matching": _pair,
    "document-question-answering": _document,
    "table-question-answering": _table,
    "text-to-audio": _text,
}
