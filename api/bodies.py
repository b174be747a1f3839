"""What the wire formats share: JSON bodies read and checked, answers written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from api.formats import check_text
from entries import Response
from errors import Empty, InvalidRequest, Malformed, ModelFailed, Rejected, TooLarge
from model import Generated

SHOWN_FAULTS = 3
SHOWN_CHARACTERS = 80
JSON_STYLE: dict[str, Any] = {
    "ensure_ascii": False,
    "allow_nan": False,
    "separators": (",", ":"),
}
MAX_KEYS = 32  # of a JSON object
MAX_NESTED = 20_000
MORE_KEYS = {"table": 64, "logit_bias": 300}  # as their models have it


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        Empty: There is nothing.
        Malformed: It is not JSON.
        Rejected: It is no object, or one with very many keys.
    """
    if not body.strip():
        raise Empty("the body is empty")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Rejected("body: send an object that holds `inputs`")
    _check_keys(value)
    return value


def validated(model: type[BaseModel], value: Any) -> Any:
    """Return `value` as `model`.

    Raises:
        Rejected: It has another shape; the text names the key.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        nests = "parameters" in model.model_fields
        told = [_describe(fault, nests) for fault in faults[:SHOWN_FAULTS]]
        raise Rejected("; ".join(told)) from None


def _check_keys(body: Mapping[str, Any]) -> None:
    """Refuse an object with very many keys before each of them becomes an error.

    Raises:
        Rejected: One has more than MAX_KEYS, or than its name allows, or there are MAX_NESTED.
    """
    stack: list[tuple[str, Any]] = [("", body)]
    for _ in range(MAX_NESTED):
        if not stack:
            return
        name, value = stack.pop()
        if isinstance(value, list):
            nested = (("", each) for each in value if isinstance(each, dict | list))
            stack += islice(nested, MAX_NESTED)
            continue
        if len(value) > MORE_KEYS.get(name, MAX_KEYS):
            raise Rejected(f"{len(value)} keys in one object")
        stack += [each for each in value.items() if isinstance(each[1], dict | list)]
    raise Rejected(f"the body holds more than {MAX_NESTED} lists and objects")


def _describe(fault: ErrorDetails, nests: bool) -> str:
    """Write a fault as `path: reason`, the path as a reader of JSON would write it.

    Args:
        fault: Of pydantic.
        nests: The body has its parameters in an object of their own.
    """
    path = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):  # the name of a branch
            name = step[:SHOWN_CHARACTERS]  # a client's key: anything
            name = name if name.isidentifier() else repr(name)
            path += f".{name}" if path else name
    reason = fault["msg"]
    match fault["type"]:
        case "extra_forbidden":
            reason = "there is no such parameter" if nests else "not served here; leave it out"
            if nests and len(fault["loc"]) == 1:
                reason += "; parameters go under `parameters`"
        case "none_required":
            reason = "not served here; leave it out"
        case "literal_error":
            reason = f"send {fault['ctx']['expected']}"
    return f"{path or 'body'}: {reason}"


def check_inputs(
    inputs: Sequence[Any], max_inputs: int, check: Callable[[Any], None] = check_text
) -> None:
    """Refuse what need not come to the queue.

    Raises:
        TooLarge: There are more than `max_inputs` inputs.
        InvalidRequest: There is none, or `check` refuses one.
    """
    if not inputs:
        raise Empty("inputs: the list is empty")
    if len(inputs) > max_inputs:
        raise TooLarge(f"{len(inputs)} inputs, and a request may hold {max_inputs}")
    for index, value in enumerate(inputs):
        try:
            check(value)
        except InvalidRequest as fault:
            fault.index = index if len(inputs) > 1 else None
            raise


def timing(responses: Sequence[Response]) -> dict[str, str]:
    """Return the headers that tell what a request waited for (ms)."""
    return {
        "x-queue-time": f"{max(response.queue_ms for response in responses):.1f}",
        "x-inference-time": f"{max(response.inference_ms for response in responses):.1f}",
        "x-batch-size": str(max(response.batch_size for response in responses)),
    }


def facts(responses: Sequence[Response]) -> dict[str, float]:
    """Return what the log tells of an answer: of a list the longest times, and all tokens."""
    slowest = max(responses, key=lambda response: response.inference_ms)
    generated = [each.output for each in responses if isinstance(each.output, Generated)]
    tokens = {"output_tokens": sum(each.new_tokens for each in generated)} if generated else {}
    return {
        "queue_ms": round(max(response.queue_ms for response in responses), 1),
        "prepare_ms": round(slowest.prepare_ms, 1),
        "inference_ms": round(slowest.inference_ms, 1),
        "finish_ms": round(slowest.finish_ms, 1),
        "batch_size": slowest.batch_size,
        "inputs": len(responses),
        "input_tokens": sum(response.tokens for response in responses),
        **tokens,
    }


def to_json(value: Any) -> bytes:
    """Write `value` as JSON.

    Raises:
        ModelFailed: JSON has no word for it; NaN, for one.
    """
    try:
        written = pydantic_core.to_json(value, inf_nan_mode="constants")
        if b"NaN" in written or b"Infinity" in written:  # a number, or part of a text?
            return json.dumps(value, **JSON_STYLE).encode()
        return written
    except (ValueError, TypeError, RecursionError):
        raise ModelFailed("the model's answer cannot be written as JSON") from None
