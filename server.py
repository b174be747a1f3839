"""The HTTP side: routes, lifespan, and the status of every error. `uvicorn server:app`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import errors
from api import http, huggingface, openai, openapi
from api.tasks import FORMATS
from batching import Worker
from config import ConfigurationError, Settings, load_settings
from lifecycle import supervise
from queueing import Request, RequestQueue
from queueing import Response as QueueResponse
from stages import Model
from telemetry import RequestLog, configure_logging

logger = logging.getLogger(__name__)

VERSION = "0.1.0"

STATUS: Mapping[type[errors.RequestError], int] = {
    errors.Malformed: 400,
    errors.Empty: 400,
    errors.Unauthorized: 401,
    errors.TooLarge: 413,
    errors.UnsupportedType: 415,
    errors.Rejected: 422,
    errors.ModelFailed: 424,
    errors.ClientGone: 499,  # never sent, but logged
    errors.Overloaded: 503,  # or OVERLOAD_STATUS
    errors.NotServing: 503,
    errors.DeadlinePassed: 504,
}

PREDICT = ("/", "/predict", "/invocations")
EMBEDDINGS = "/v1/embeddings"
WEB = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}

LINKS = {
    "predict": "/",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "info": "/info",
    "health": "/health",
    "live": "/livez",
    "ready": "/readyz",
}


@dataclass(frozen=True, slots=True)
class Service:
    """What runs behind the routes; the lifespan puts it on `app.state.service`."""

    settings: Settings
    queue: RequestQueue
    worker: Worker


def service(request: HTTPRequest) -> Service:
    """Return what runs behind the route of `request`."""
    found: Service = request.app.state.service
    return found


class Root(HTTPEndpoint):
    """`/`: a page or a short description for GET, the task for POST."""

    async def get(self, request: HTTPRequest) -> Response:
        """Say what runs here: browsers get a page to try it."""
        if "text/html" in request.headers.get("accept", ""):
            return FileResponse(WEB / "playground.html", headers=PAGE_HEADERS)
        settings = service(request).settings
        about = {"name": "onequeue", "version": VERSION, "links": LINKS}
        task = model_info(request).get("task", settings.task)
        return JSONResponse(about | {"model": settings.model_id, "task": task})

    async def post(self, request: HTTPRequest) -> Response:
        """Answer with the pipeline's own JSON."""
        return await predict(request)


async def predict(request: HTTPRequest) -> Response:
    """Answer in the Hugging Face wire format.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    task = FORMATS[model_info(request)["task"]]
    content_type = request.headers.get("content-type", "")
    call = await huggingface.read(body, content_type, _max_inputs(request), task)
    responses = await _submit(request, call.inputs, call.parameters, deadline)
    return await huggingface.respond(call, responses, request.headers.get("accept", ""))


async def embeddings(request: HTTPRequest) -> Response:
    """Answer in the OpenAI wire format.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    deadline, body = await _admitted_body(request)
    if (task := model_info(request)["task"]) != "feature-extraction":
        raise HTTPException(404, f"the model here does {task}")
    inputs, parameters, as_base64 = openai.parse_embeddings(body, _max_inputs(request))
    responses = await _submit(request, inputs, parameters, deadline)
    return openai.embeddings(responses, service(request).settings.model_id, as_base64)


async def models(request: HTTPRequest) -> Response:
    """List the one model.

    Raises:
        Unauthorized: There is an API key and the request does not carry it.
    """
    settings = service(request).settings
    http.authorize(request, settings)
    return openai.models(settings.model_id)


async def _admitted_body(request: HTTPRequest) -> tuple[float, bytes]:
    """Return the deadline and the body of a request that may be answered."""
    settings = service(request).settings
    http.authorize(request, settings)
    service(request).queue.check_serving()
    deadline = asyncio.get_running_loop().time() + http.timeout_s(request, settings)
    return deadline, await http.read_body(request, settings.max_body_bytes, deadline)


async def _submit(
    request: HTTPRequest, inputs: Sequence[Any], parameters: Mapping[str, Any], deadline: float
) -> Sequence[QueueResponse]:
    """Put the inputs on the queue and wait for the answers, or for the client to leave."""
    pending = Request(inputs, parameters, deadline, request.state.request_id)
    with http.watching(request, pending):
        return await service(request).queue.submit(pending)


def _max_inputs(request: HTTPRequest) -> int:
    settings = service(request).settings
    return min(settings.max_inputs_per_request, settings.max_queue_size)


def model_info(request: HTTPRequest) -> Mapping[str, Any]:
    """Return the facts of the model; nothing while it is loading."""
    model = service(request).worker.model
    return model.info if model else {}


async def ready(request: HTTPRequest) -> Response:
    """Answer 200 only when a request sent now would be admitted, queue room aside."""
    queue = service(request).queue
    queue.check_serving()
    return JSONResponse({"status": queue.state})


async def live(request: HTTPRequest) -> Response:
    """Answer 200 while the worker makes progress; loading and draining are life too."""
    if not service(request).worker.alive():
        retry_after_s = service(request).queue.retry_after_s()
        raise errors.NotServing("the worker makes no progress", retry_after_s)
    return JSONResponse({"status": "alive"})


async def info(request: HTTPRequest) -> Response:
    """Describe model, limits and load."""
    behind = service(request)
    about = {
        "model_id": behind.settings.model_id,
        "task": behind.settings.task,
        **model_info(request),
        "version": VERSION,
        "state": behind.queue.state,
        "queue_depth": behind.queue.depth,
        "in_flight": len(behind.queue.in_flight),
        "api_key_required": behind.settings.api_key is not None,
        "limits": {name: value for name, value in behind.settings if type(value) in (int, float)},
    }
    return JSONResponse(about)


async def openapi_document(request: HTTPRequest) -> Response:
    """Describe what is served."""
    model = model_info(request)
    task = model.get("task")
    served = openapi.Served(
        version=VERSION,
        task=task,
        format=FORMATS[task] if task else None,
        paths=PREDICT,
        mask_token=model.get("mask_token"),
        keyed=service(request).settings.api_key is not None,
    )
    return JSONResponse(openapi.document(served))


async def docs(_request: HTTPRequest) -> Response:
    """Show the description to people."""
    return FileResponse(WEB / "docs.html", headers=PAGE_HEADERS)


async def on_request_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer a `RequestError`; leave the cause for the log."""
    assert isinstance(error, errors.RequestError)
    request.state.cause = str(error)
    return refusal(service(request).settings, request.scope["path"], error)


def refusal(settings: Settings, path: str, error: errors.RequestError) -> Response:
    """Return the answer to `error`, in the words of the wire format of `path`."""
    status = STATUS[type(error)]
    headers = {}
    if isinstance(error, errors.Overloaded):
        status = settings.overload_status
    if isinstance(error, errors.Unavailable):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = "Bearer"
    body: Mapping[str, Any] = {"error": str(error), "error_type": error.error_type}
    if path.startswith(openai.PREFIX):
        body = openai.error_body(str(error), error.error_type, status)
    return JSONResponse(body, status, headers)


async def on_http_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer what the router refuses (404, 405) in the same shape."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    text = f"{request.method} {path}: {error.detail}"
    body: Mapping[str, Any] = {"error": text, "error_type": "validation"}
    if path.startswith(openai.PREFIX):
        body = openai.error_body(text, "validation", error.status_code)
    return JSONResponse(body, error.status_code, error.headers)


async def on_disconnect(request: HTTPRequest, _error: Exception) -> Response:
    """End a request whose client left before its body had come; the response goes nowhere."""
    request.state.cause = "the client hung up"
    return Response(status_code=STATUS[errors.ClientGone])


async def on_bug(request: HTTPRequest, _error: Exception) -> Response:
    """Answer an error of our own; uvicorn logs the traceback next."""
    logger.error("request %s: internal error", request.state.request_id)
    headers = {"x-request-id": request.state.request_id}
    return JSONResponse({"error": "internal error", "error_type": "backend"}, 500, headers)


def create_app(settings: Settings, load: Callable[[], Model] | None = None) -> Starlette:
    """Return the application.

    Args:
        settings: All of its options.
        load: Returns the model, in the model thread; None: the pipeline that `settings` names.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        queue = RequestQueue(settings)
        worker = Worker(settings, queue, load or partial(load_pipeline, settings))
        app.state.service = Service(settings, queue, worker)
        task = asyncio.create_task(worker.run(), name="worker")
        with supervise(queue, worker, task, settings.drain_timeout_s):
            yield
            await queue.drain(settings.drain_timeout_s)  # under uvicorn, done before it comes here
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    app = Starlette(
        routes=[
            Route("/", Root),
            *(Route(path, predict, methods=["POST"]) for path in PREDICT if path != "/"),
            Route(EMBEDDINGS, embeddings, methods=["POST"]),
            Route("/v1/models", models),
            *(Route(path, ready) for path in ("/health", "/readyz", "/ping")),
            Route("/livez", live),
            Route("/info", info),
            Route("/openapi.json", openapi_document),
            Route("/docs", docs),
        ],
        middleware=[
            Middleware(http.Door, paths=(*PREDICT, EMBEDDINGS), refusal=partial(refusal, settings)),
            Middleware(RequestLog),
            Middleware(http.Connections),
        ],
        exception_handlers={
            errors.RequestError: on_request_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def load_pipeline(settings: Settings) -> Model:
    """Import torch and load the model, in the model thread: the port is open long before."""
    from inference.loading import load

    return load(settings)


def __getattr__(name: str) -> Starlette:
    """Build `app` when uvicorn asks for it: a mere import reads no environment, sets up no logs."""
    if name != "app":
        raise AttributeError(name)
    try:
        settings = load_settings()
    except ConfigurationError as error:
        sys.exit(f"onequeue: {error}")
    configure_logging(settings)
    return create_app(settings)
