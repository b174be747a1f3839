"""The wire formats of the tasks on images, sounds, videos, documents and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from api import media_parameters as given
from api.formats import MANY, PAIR, OneOrMany, TaskFormat, body, branch, check_text
from api.media import CHECKS, OneOrManyMedia
from errors import TooLarge

MAX_SPOKEN_CHARACTERS = 5_000
EXAMPLES = {  # the smallest: four pixels, eight samples
    "image": "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR42mM8ISfHwMDAxMDAwMDAAAANBAEI"
    "f62CUQAAAABJRU5ErkJggg==",
    "audio": "UklGRiwAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQgAAACAgICAgICAgA==",
}
LABELS = {"candidate_labels": ["cat", "dog"]}


def check_document(value: Mapping[str, Any]) -> None:
    """Check the image and the question."""
    CHECKS["image"](value["image"])
    check_text(value["question"])


def check_pair(value: Mapping[str, Any]) -> None:
    """Check both images."""
    for each in value["images"]:
        CHECKS["image"](each)


def check_spoken(text: str) -> None:
    """Check a text, and that it does not take hours to speak."""
    check_text(text)
    if len(text) > MAX_SPOKEN_CHARACTERS:
        raise TooLarge(f"{len(text)} characters, and at most {MAX_SPOKEN_CHARACTERS} are spoken")


def check_query(value: Mapping[str, Any]) -> None:
    """Check the question about a table."""
    check_text(value["query"])


def one_or_many(model: Any) -> Any:
    """Return the type of `inputs` for a task whose inputs are objects with several parts."""
    many = Annotated[list[model], Field(fail_fast=True), Tag(MANY)]
    return Annotated[Annotated[model, Tag(PAIR)] | many, Discriminator(branch)]


def one_medium(kind: str, parameters: type[BaseModel], **example: Any) -> TaskFormat:
    """Return the format of a task whose input is one image, sound or video."""
    name = parameters.__name__.removesuffix("Parameters")
    shown = {"inputs": EXAMPLES.get(kind), "parameters": example}
    return TaskFormat(
        body(f"{kind.title()}{name}Body", OneOrManyMedia, parameters),
        examples={"base64": shown} if kind in EXAMPLES else {},
        raw=kind,
        check=CHECKS[kind],
    )


MEDIA_FORMATS: Mapping[str, TaskFormat] = {
    "image-classification": one_medium("image", given.ClassificationParameters, top_k=2),
    "image-segmentation": one_medium("image", given.ImageSegmentationParameters, threshold=0.5),
    "object-detection": one_medium("image", given.ObjectDetectionParameters, threshold=0.9),
    "depth-estimation": one_medium("image", given.DepthEstimationParameters),
    "image-feature-extraction": one_medium(
        "image", given.ImageFeatureExtractionParameters, pool=True
    ),
    "mask-generation": one_medium("image", given.MaskGenerationParameters, points_per_crop=8),
    "zero-shot-image-classification": one_medium("image", given.ZeroShotParameters, **LABELS),
    "zero-shot-object-detection": one_medium(
        "image", given.ZeroShotObjectDetectionParameters, **LABELS
    ),
    "audio-classification": one_medium("audio", given.ClassificationParameters, top_k=2),
    "zero-shot-audio-classification": one_medium("audio", given.ZeroShotParameters, **LABELS),
    "automatic-speech-recognition": one_medium("audio", given.SpeechParameters),
    "video-classification": one_medium("video", given.VideoClassificationParameters),
    "keypoint-matching": TaskFormat(
        body("KeypointMatchingBody", one_or_many(given.ImagePair), given.KeypointParameters),
        examples={"two images": {"inputs": {"images": [EXAMPLES["image"]] * 2}}},
        raw="",
        check=check_pair,
    ),
    "document-question-answering": TaskFormat(
        body("DocumentBody", one_or_many(given.Document), given.DocumentParameters),
        examples={"a question": {"inputs": {"image": EXAMPLES["image"], "question": "How much?"}}},
        raw="",
        check=check_document,
    ),
    "table-question-answering": TaskFormat(
        body("TableBody", one_or_many(given.Table), given.TableParameters),
        examples={
            "a question": {
                "inputs": {
                    "query": "How many stars has Python?",
                    "table": {"language": ["Python", "C"], "stars": ["9", "7"]},
                }
            }
        },
        raw="",
        check=check_query,
    ),
    "text-to-audio": TaskFormat(
        body("TextToAudioBody", OneOrMany, given.SpokenParameters),
        examples={"one text": {"inputs": "Hello, how are you?"}},
        check=check_spoken,
        speaks=True,
    ),
}
