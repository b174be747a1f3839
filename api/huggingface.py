"""The Hugging Face wire format: raw text, or {"inputs", "parameters"} as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.responses import Response as HTTPResponse

from errors import (
    Empty,
    InvalidRequest,
    Malformed,
    ModelFailed,
    Rejected,
    TooLarge,
    UnsupportedType,
)
from queueing import Response

# What `curl -d` sends, whatever the data is, and no type at all.
TEXT_TYPES = ("application/x-www-form-urlencoded", "")
SHOWN_FAULTS = 3
SHOWN_CHARACTERS = 80
JSON_STYLE: dict[str, Any] = {
    "ensure_ascii": False,
    "allow_nan": False,
    "separators": (",", ":"),
}
MAX_KEYS = 32  # of a JSON object


ONE, MANY = "<one>", "<many>"


def one_or_many(value: Any) -> str:
    """Name the branch of a union of one and many, so that errors speak of that branch alone."""
    return MANY if isinstance(value, list) else ONE


Text = Annotated[str, Tag(ONE)]
Texts = Annotated[list[str], Field(fail_fast=True), Tag(MANY)]
Target = Annotated[str, Field(max_length=200), Tag(ONE)]
Targets = Annotated[
    list[Annotated[str, Field(max_length=200)]],
    Field(min_length=1, max_length=1000, fail_fast=True),
    Tag(MANY),
]


class TokenizerArguments(BaseModel):
    """What a request may tell the tokenizer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    truncation: bool | None = None
    max_length: int | None = Field(None, ge=3, le=1_000_000, description="With the special tokens.")
    add_special_tokens: bool | None = None


class FillMaskParameters(BaseModel):
    """Parameters of the fill-mask pipeline."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top_k: int | None = Field(None, ge=1, description="Answers per mask.")
    targets: Annotated[Target | Targets, Discriminator(one_or_many)] | None = Field(
        None, description="Score these words only."
    )
    tokenizer_kwargs: TokenizerArguments | None = None


class FillMaskBody(BaseModel):
    """The JSON body of a fill-mask request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: Annotated[Text | Texts, Discriminator(one_or_many)] = Field(
        description="A text with at least one mask token, or a list of such texts."
    )
    parameters: FillMaskParameters | None = None
    options: Any = Field(None, description="Ignored; older clients send it.")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request.

    Attributes:
        inputs: At least one text, none of them blank.
        parameters: Keyword arguments of the pipeline, without those that were not given.
        is_list: The client sent a list, so it gets a list, also of one.
    """

    inputs: list[str]
    parameters: Mapping[str, Any]
    is_list: bool


def parse(body: bytes, content_type: str, max_inputs: int) -> Call:
    """Parse and check a request body.

    Raises:
        UnsupportedType: `content_type` is neither text nor JSON, or not UTF-8.
        Malformed: `body` is not UTF-8, or not JSON.
        Rejected: The JSON has another shape; the text names the key.
        Empty: There is no input, or a blank one.
        TooLarge: There are more than `max_inputs` inputs.
    """
    media_type = _media_type(content_type)
    if media_type == "application/json":
        call = _parse_json(body)
    elif media_type in TEXT_TYPES or media_type.startswith("text/"):
        call = _parse_text(body)
    else:
        shown = media_type[:SHOWN_CHARACTERS]
        raise UnsupportedType(f"content type {shown!r}: send text/plain or application/json")
    if len(call.inputs) > max_inputs:
        raise TooLarge(f"{len(call.inputs)} inputs, and a request may hold {max_inputs}")
    _check_texts(call)
    return call


async def respond(call: Call, responses: Sequence[Response]) -> HTTPResponse:
    """Answer with the outputs as they are, and say in headers how long they took (ms).

    Raises:
        ModelFailed: JSON has no word for an output; NaN, for one.
    """
    parts = []
    for response in responses:
        try:
            parts.append(json.dumps(response.output, **JSON_STYLE).encode())
        except (ValueError, TypeError, RecursionError):
            raise ModelFailed("the model's answer cannot be written as JSON") from None
        if call.is_list:
            await asyncio.sleep(0)  # many long answers must not hold the event loop up
    headers = {
        "x-queue-time": f"{max(response.queue_ms for response in responses):.1f}",
        "x-inference-time": f"{max(response.inference_ms for response in responses):.1f}",
        "x-batch-size": str(max(response.batch_size for response in responses)),
    }
    body = b"[" + b",".join(parts) + b"]" if call.is_list else parts[0]
    return HTTPResponse(body, headers=headers, media_type="application/json")


def _media_type(content_type: str) -> str:
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedType(f"charset {value[:SHOWN_CHARACTERS]!r}: send UTF-8")
    return media_type


def _parse_text(body: bytes) -> Call:
    try:
        return Call([body.decode()], {}, is_list=False)
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8 (byte {error.start})") from None


def _parse_json(body: bytes) -> Call:
    if not body.strip():
        raise Empty("the body is empty")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Rejected("body: send an object that holds `inputs`")
    _check_keys(value)
    try:
        parsed = FillMaskBody.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise Rejected("; ".join(map(_describe, faults[:SHOWN_FAULTS]))) from None
    parameters = parsed.parameters.model_dump(exclude_none=True) if parsed.parameters else {}
    if isinstance(parsed.inputs, list):
        return Call(parsed.inputs, parameters, is_list=True)
    return Call([parsed.inputs], parameters, is_list=False)


def _check_keys(body: Mapping[str, Any]) -> None:
    """Refuse an object with very many keys before each of them becomes an error.

    Raises:
        Rejected: There are more than MAX_KEYS, here or below.
    """
    value: Any = body
    for inner in ("parameters", "tokenizer_kwargs", ""):
        if isinstance(value, dict):
            if len(value) > MAX_KEYS:
                raise Rejected(f"{len(value)} keys in one object")
            value = value.get(inner)


def _describe(fault: ErrorDetails) -> str:
    """Write a fault as `path: reason`, the path as a reader of JSON would write it."""
    path = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in (ONE, MANY):
            name = step[:SHOWN_CHARACTERS]  # a client's key: anything
            name = name if name.isidentifier() else repr(name)
            path += f".{name}" if path else name
    reason = fault["msg"]
    if fault["type"] == "extra_forbidden":
        nested = "" if len(fault["loc"]) > 1 else "; parameters go under `parameters`"
        reason = f"there is no such parameter{nested}"
    return f"{path or 'body'}: {reason}"


def _check_texts(call: Call) -> None:
    """Refuse what no tokenizer should see.

    Raises:
        Empty: No text, or one without a visible character.
        Rejected: A text holds a NUL.
    """
    if not call.inputs:
        raise Empty("inputs: the list is empty")
    for index, text in enumerate(call.inputs):
        fault: InvalidRequest
        if not text.strip():
            fault = Empty("the input is empty")
        elif "\0" in text:
            fault = Rejected("the input holds a NUL character")
        else:
            continue
        fault.index = index if len(call.inputs) > 1 else None
        raise fault
