"""Media in JSON: base64 or a data: URI. Nothing is fetched, and no file is opened."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

import media
from api.formats import MANY, ONE, branch

DATA_URI = re.compile(r"data:[^,]{0,200};base64,")
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://")

CHECKS: Mapping[str, Callable[[bytes], None]] = {
    "image": media.check_image,
    "audio": media.check_audio,
    "video": media.check_video,
}


def from_base64(value: Any) -> bytes:
    """Return the bytes that base64, or a data: URI, stands for.

    Raises:
        PydanticCustomError: It is something else.
    """
    if not isinstance(value, str):
        raise PydanticCustomError("base64", "send base64 or a data: URI")
    if ADDRESS.match(value):
        raise PydanticCustomError("base64", "URLs are not fetched; send the bytes")
    head = DATA_URI.match(value)
    text = value[head.end() :] if head else value
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError:
        raise PydanticCustomError("base64", "this is not base64") from None


Medium = Annotated[
    bytes,
    BeforeValidator(from_base64),
    WithJsonSchema(
        {"type": "string", "contentEncoding": "base64", "description": "base64 or a data: URI"}
    ),
]
OneOrManyMedia = Annotated[
    Annotated[Medium, Tag(ONE)] | Annotated[list[Medium], Field(fail_fast=True), Tag(MANY)],
    Discriminator(branch),
]
