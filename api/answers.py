"""What the answer to one input looks like, by task; for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Has these keys and no others."""

    model_config = ConfigDict(extra="forbid")


class FilledMask(Answer):
    """One word for a mask."""

    score: float
    token: int
    token_str: str
    sequence: str


class Label(Answer):
    """A label and how sure the model is of it."""

    label: str
    score: float


class Entity(BaseModel):
    """A token, or with an aggregation strategy a group of them."""

    entity: str | None = None
    entity_group: str | None = None
    score: float
    index: int | None = None
    word: str
    start: int | None
    end: int | None


class Box(Answer):
    """In pixels."""

    xmin: int
    ymin: int
    xmax: int
    ymax: int


class Detection(Answer):
    """An object in an image."""

    score: float
    label: str
    box: Box


class Segment(Answer):
    """A part of an image."""

    score: float | None
    label: str
    mask: str = Field(description="PNG, base64.")


class Transcript(BaseModel):
    """What was said."""

    text: str
    chunks: list[dict[str, Any]] | None = None


class GeneratedText(BaseModel):
    """How a text goes on."""

    generated_text: str
    details: dict[str, Any] | None = None


Labels = list[Label]
ANSWERS: Mapping[str, Any] = {
    "text-generation": list[GeneratedText],
    "fill-mask": list[FilledMask] | list[list[FilledMask]],
    "text-classification": Labels,
    "token-classification": list[Entity],
    "zero-shot-classification": Labels,
    "feature-extraction": list[float] | list[list[float]],
    "image-classification": Labels,
    "zero-shot-image-classification": Labels,
    "audio-classification": Labels,
    "zero-shot-audio-classification": Labels,
    "video-classification": Labels,
    "object-detection": list[Detection],
    "zero-shot-object-detection": list[Detection],
    "image-segmentation": list[Segment],
    "automatic-speech-recognition": Transcript,
}


class Status(Answer):
    """How the server is."""

    status: str


class Error(Answer):
    """Why there is no answer."""

    error: str = Field(description="For people.")
    error_type: str = Field(description="For programs.")
