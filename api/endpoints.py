"""The routes of inference: a body in any wire format, through the queue, and its answer back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import errors
from api import http, huggingface, openai, openai_text, tgi
from api.bodies import facts
from api.events import HEARTBEAT_S, Dialect, EventStream
from api.openai_writers import ChatWriter, Writer
from api.tasks import FORMATS
from entries import Request
from entries import Response as QueueResponse
from service import model_info, service
from telemetry import route_path

PREDICT = ("/", "/predict", "/invocations")
GENERATE = ("/generate", "/generate_stream")
EMBEDDINGS, COMPLETIONS, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
INFERENCE = (*PREDICT, *GENERATE, EMBEDDINGS, COMPLETIONS, CHAT)


async def predict(request: HTTPRequest) -> Response:
    """Answer in the Hugging Face wire format.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    task = FORMATS[model_info(request)["task"]]
    content_type = request.headers.get("content-type", "")
    call = await huggingface.read(body, content_type, _max_inputs(request), task)
    if call.streams:
        return await _stream(request, call.inputs, call.parameters, deadline, tgi.Events())
    responses = await _submit(request, call.inputs, call.parameters, deadline)
    return await huggingface.respond(call, responses, request.headers.get("accept", ""))


async def generate(request: HTTPRequest) -> Response:
    """Go on with a text, in the wire format of Hugging Face's text generation servers.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    _check_task(request, "text-generation")
    content_type = request.headers.get("content-type", "")
    call = await huggingface.read(body, content_type, 1, FORMATS["text-generation"])
    if call.streams or request.url.path.endswith("_stream"):
        parameters = {**call.parameters, "details": True}
        return await _stream(request, call.inputs, parameters, deadline, tgi.Events())
    return tgi.one(await _submit(request, call.inputs, call.parameters, deadline))


async def complete(request: HTTPRequest) -> Response:
    """Go on with a text or a chat, in the OpenAI wire format.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    _check_task(request, "text-generation")
    names = request.state.request_id, model_info(request)["model_id"]
    if route_path(request.scope) == CHAT:
        if not model_info(request)["chat"]:
            raise errors.Malformed(f"the model has no chat template: use {COMPLETIONS}")
        call = openai_text.parse_chat(body)
        writer: Writer = ChatWriter(*names, usage=call.usage)
    else:
        call = openai_text.parse_completion(body, _max_inputs(request))
        writer = Writer(*names, usage=call.usage)
    if call.streams:
        return await _stream(request, call.inputs, call.parameters, deadline, writer)
    return writer.answer(await _submit(request, call.inputs, call.parameters, deadline))


async def embeddings(request: HTTPRequest) -> Response:
    """Answer in the OpenAI wire format.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    _check_task(request, "feature-extraction")
    inputs, parameters, as_base64 = openai.parse_embeddings(body, _max_inputs(request))
    responses = await _submit(request, inputs, parameters, deadline)
    return openai.embeddings(responses, model_info(request)["model_id"], as_base64)


async def models(request: HTTPRequest) -> Response:
    """List the one model, or tell of it.

    Raises:
        Unauthorized: There is an API key and the request does not carry it.
    """
    settings = service(request).settings
    http.authorize(request, settings.api_key)
    model_id = model_info(request).get("model_id", settings.model_id)
    wanted = request.path_params.get("model_id")
    if wanted is None:
        return openai.models(model_id)
    if wanted != model_id:
        raise HTTPException(404, f"the model here is {model_id!r}")
    return openai.model(model_id)


async def _admitted_body(request: HTTPRequest) -> tuple[float, bytes]:
    """Return the deadline and the body of a request that may be answered."""
    settings = service(request).settings
    http.authorize(request, settings.api_key)
    service(request).queue.check_serving()
    deadline = asyncio.get_running_loop().time() + http.timeout_s(request, settings)
    return deadline, await http.read_body(request, settings.max_body_bytes, deadline)


async def _submit(
    request: HTTPRequest, inputs: Sequence[Any], parameters: Mapping[str, Any], deadline: float
) -> Sequence[QueueResponse]:
    """Put the inputs on the queue and wait for the answers, or for the client to leave."""
    pending = Request(inputs, parameters, deadline, request.state.request_id)
    with http.watching(request, pending):
        responses = await service(request).queue.submit(pending)
    request.state.facts = facts(responses)
    return responses


async def _stream(
    request: HTTPRequest,
    inputs: Sequence[Any],
    parameters: Mapping[str, Any],
    deadline: float,
    dialect: Dialect,
) -> Response:
    """Put the inputs on the queue and answer in pieces.

    The answer begins with its first piece, so that a refusal has its own status; but not later than
    a heartbeat, so that nobody in between gives up.
    """
    pending = Request(inputs, parameters, deadline, request.state.request_id, streams=True)
    pieces = service(request).queue.stream(pending, HEARTBEAT_S)
    with http.watching(request, pending):
        first = await anext(pieces)
    return EventStream(first, pieces, dialect, http.watching(request, pending))


def _check_task(request: HTTPRequest, wanted: str) -> None:
    """Say that a path leads nowhere unless the model does what is wanted there."""
    if (task := model_info(request)["task"]) != wanted:
        raise HTTPException(404, f"the model here does {task}")


def _max_inputs(request: HTTPRequest) -> int:
    settings = service(request).settings
    return min(settings.max_inputs_per_request, settings.max_queue_size)
