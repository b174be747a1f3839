"""The Hugging Face wire format: the raw input, or {"inputs", "parameters"} as JSON."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response as HTTPResponse

from api.bodies import SHOWN_CHARACTERS, check_inputs, read_object, timing, to_json, validated
from api.formats import TaskFormat, as_it_is
from api.tasks import Similarity, cosines
from entries import Response
from errors import Malformed, Rejected, UnsupportedType

# What `curl -d` sends, whatever the data is, and no type at all.
ANY_TYPES = ("application/x-www-form-urlencoded", "")
BINARY_TYPE = "application/octet-stream"
LARGE_BODY_BYTES = 65_536  # a header can be as long as the file: the event loop must not wait
INPUTS, INSTANCES = "inputs", "instances"
OTHER_KEYS = {INPUTS, "parameters", "options", "stream"}


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request.

    Attributes:
        inputs: At least one, and no blank text in any.
        parameters: Keyword arguments of the pipeline, without those that were not given.
        is_list: It is answered with a list, also of one.
        write: Makes of an output what the client expects.
        combine: Makes one answer of all outputs.
        key: Of an object around the answer.
        speaks: The answer is a sound.
        streams: The answer is wanted in pieces.
    """

    inputs: Sequence[Any]
    parameters: Mapping[str, Any]
    is_list: bool
    write: Callable[[Any], Any] = as_it_is
    combine: Callable[[list[Any]], Any] | None = None
    key: str | None = None
    speaks: bool = False
    streams: bool = False


async def read(body: bytes, content_type: str, max_inputs: int, task: TaskFormat) -> Call:
    """Do as `parse` does, but look through a large image or sound in another thread."""
    if task.raw == "text" or len(body) < LARGE_BODY_BYTES:
        return parse(body, content_type, max_inputs, task)
    return await asyncio.to_thread(parse, body, content_type, max_inputs, task)


def parse(body: bytes, content_type: str, max_inputs: int, task: TaskFormat) -> Call:
    """Parse and check a request body.

    Raises:
        UnsupportedType: `content_type` is neither JSON nor what the task takes, or not UTF-8.
        Malformed: `body` is not UTF-8, or not JSON.
        Rejected: The JSON has another shape; the text names the key.
        Empty: There is no input, or a blank one.
        TooLarge: There are more than `max_inputs` inputs.
    """
    media_type = _media_type(content_type)
    if media_type == "application/json":
        call = _parse_json(body, task)
    elif _is_raw(media_type, task):
        call = _parse_raw(body, task)
    else:
        shown = media_type[:SHOWN_CHARACTERS]
        better = {"text": "text/plain or ", "": ""}.get(task.raw, f"{task.raw}/* or ")
        raise UnsupportedType(f"content type {shown!r}: send {better}application/json")
    check_inputs(call.inputs, max_inputs, task.check)
    return call


async def respond(call: Call, responses: Sequence[Response], accept: str = "") -> HTTPResponse:
    """Answer with the outputs, and say in headers how long they took (ms).

    One sound is answered as it stands, as WAV, unless `accept` names JSON.

    Raises:
        ModelFailed: JSON has no word for an output; NaN, for one.
    """
    outputs = [response.output for response in responses]
    if call.speaks and not call.is_list and "application/json" not in accept:
        sound = binascii.a2b_base64(outputs[0]["audio"])
        return HTTPResponse(sound, headers=timing(responses), media_type="audio/wav")
    if call.combine:
        body = to_json(call.combine(outputs))
    elif call.is_list:
        parts = []
        for output in outputs:
            parts.append(to_json(call.write(output)))
            await asyncio.sleep(0)  # many long answers must not hold the event loop up
        body = b"[" + b",".join(parts) + b"]"
    else:
        body = to_json(call.write(outputs[0]))
    if call.key:
        body = b'{"%s":%s}' % (call.key.encode(), body)
    return HTTPResponse(body, headers=timing(responses), media_type="application/json")


def _media_type(content_type: str) -> str:
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedType(f"charset {value[:SHOWN_CHARACTERS]!r}: send UTF-8")
    return media_type


def _is_raw(media_type: str, task: TaskFormat) -> bool:
    """Tell whether a body of this type is the input as it stands."""
    if not task.raw:
        return False
    own = media_type.startswith(f"{task.raw}/") or media_type in ANY_TYPES
    return own or (media_type == BINARY_TYPE and task.raw != "text")


def _parse_raw(body: bytes, task: TaskFormat) -> Call:
    if any(field.is_required() for name, field in task.body.model_fields.items() if name != INPUTS):
        raise UnsupportedType("this task needs parameters: send application/json")
    try:
        value = body.decode() if task.raw == "text" else body
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8 (byte {error.start})") from None
    return Call([value], {}, is_list=False, write=task.write, speaks=task.speaks)


def _parse_json(body: bytes, task: TaskFormat) -> Call:
    value = read_object(body)
    key = None
    if INSTANCES in value and INPUTS not in value:  # of Vertex AI
        value, key = _from_instances(value), "predictions"
    parsed = validated(task.body, value)
    parameters = _given(parsed, task)
    if parsed.parameters:
        parameters |= _given(parsed.parameters, task)
    match parsed.inputs:
        case Similarity(source_sentence=source, sentences=others):
            return _comparison([source, *others], parameters)
        case list():
            inputs, is_list = parsed.inputs, True
        case _:
            inputs, is_list = [parsed.inputs], task.wraps
    streams = bool(getattr(parsed, "stream", False))
    if streams:
        if is_list:
            raise Rejected("stream: send one input")
        parameters["details"] = True  # each piece tells of its token
    plain = [each.model_dump() if isinstance(each, BaseModel) else each for each in inputs]
    return Call(
        plain, parameters, is_list, task.write, key=key, speaks=task.speaks, streams=streams
    )


def _comparison(texts: list[str], parameters: dict[str, Any]) -> Call:
    """Return what asks how near the first text is to each other one.

    Raises:
        Rejected: Several vectors are asked for of each.
    """
    if parameters.get("pooling") == "none":
        raise Rejected("parameters.pooling: texts are compared by one vector each")
    return Call(texts, parameters, is_list=True, combine=cosines)


def _from_instances(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what {"instances", "parameters"} says in our words.

    Raises:
        Rejected: `instances` is not a list.
    """
    instances = body[INSTANCES]
    if not isinstance(instances, list):
        raise Rejected(f"{INSTANCES}: send a list")
    rest = {name: value for name, value in body.items() if name != INSTANCES}
    inputs = [
        each[INPUTS] if isinstance(each, dict) and set(each) == {INPUTS} else each
        for each in instances
    ]
    return {INPUTS: inputs, **rest}


def _given(parameters: BaseModel, task: TaskFormat) -> dict[str, Any]:
    """Return the parameters that were given, as plain values."""
    names = set(type(parameters).model_fields) - OTHER_KEYS
    values = parameters.model_dump(include=names, exclude_none=True)
    nulls = parameters.model_fields_set & task.nullable - values.keys()
    return values | dict.fromkeys(nulls)
