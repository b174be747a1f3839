"""The HTTP side: routes, lifespan, and the status of every error. `uvicorn server:app`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

import errors
from api import admin, connections, endpoints, http, openai, openapi
from api.tasks import FORMATS
from batching import Worker
from config import ConfigurationError, Settings, load_settings, prepare_allocator
from lifecycle import supervise
from metrics import CONTENT_TYPE, Metrics
from queueing import RequestQueue
from reloading import Reloader
from service import Service, model_info, service
from stages import Generator, Model
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
    errors.Conflict: 409,
    errors.ModelFailed: 424,
    errors.ClientGone: 499,  # never sent, but logged
    errors.Overloaded: 503,  # or OVERLOAD_STATUS
    errors.NotServing: 503,
    errors.DeadlinePassed: 504,
}

WEB = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
EXPOSED = ("x-request-id", "x-queue-time", "x-inference-time", "x-total-time", "x-batch-size")

LINKS = {
    "predict": "/",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "info": "/info",
    "health": "/health",
    "live": "/livez",
    "ready": "/readyz",
    "metrics": "/metrics",
}


class Root(HTTPEndpoint):
    """`/`: a page or a short description for GET, the task for POST."""

    async def get(self, request: HTTPRequest) -> Response:
        """Say what runs here: browsers get a page to try it."""
        settings = service(request).settings
        known = {"model_id": settings.model_id, "task": settings.task, **model_info(request)}
        task = known["task"]
        if "text/html" in request.headers.get("accept", ""):
            page = "chat.html" if task == "text-generation" else "playground.html"
            return FileResponse(WEB / page, headers=PAGE_HEADERS)
        about = {"name": "onequeue", "version": VERSION, "links": LINKS}
        return JSONResponse(about | {"model": known["model_id"], "task": task})

    async def post(self, request: HTTPRequest) -> Response:
        """Answer with the pipeline's own JSON."""
        return await endpoints.predict(request)


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
    about: dict[str, Any] = {
        "model_id": behind.settings.model_id,
        "task": behind.settings.task,
        **model_info(request),
        "reload": behind.reloader.progress or None,
        "version": VERSION,
        "state": behind.queue.state,
        "queue_depth": behind.queue.depth,
        "in_flight": len(behind.queue.in_flight),
        "api_key_required": behind.settings.api_key is not None,
        "limits": {name: value for name, value in behind.settings if type(value) in (int, float)},
    }
    if isinstance(behind.worker.model, Generator):
        about["generation"] = behind.worker.model.load
    return JSONResponse(about)


async def scrape(request: HTTPRequest) -> Response:
    """Write the metrics for Prometheus.

    Raises:
        Unauthorized: There is a METRICS_KEY and the request does not carry it.
    """
    http.authorize(request, service(request).settings.metrics_key)
    return Response(service(request).queue.metrics.written(), media_type=CONTENT_TYPE)


async def openapi_document(request: HTTPRequest) -> Response:
    """Describe what is served."""
    model = model_info(request)
    task = model.get("task")
    served = openapi.Served(
        version=VERSION,
        task=task,
        format=FORMATS[task] if task else None,
        paths=endpoints.PREDICT,
        mask_token=model.get("mask_token"),
        chats=model.get("chat", False),
        keyed=service(request).settings.api_key is not None,
    )
    return JSONResponse(openapi.document(served))


async def docs(_request: HTTPRequest) -> Response:
    """Show the description to people."""
    return FileResponse(WEB / "docs.html", headers=PAGE_HEADERS)


async def on_request_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer a `RequestError`; leave it for log and metrics."""
    assert isinstance(error, errors.RequestError)
    request.state.error = error
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
    return JSONResponse(_error_body(path, str(error), error.error_type, status), status, headers)


def _error_body(path: str, text: str, error_type: str, status: int) -> Mapping[str, Any]:
    if path.startswith(openai.PREFIX):
        return openai.error_body(text, error_type, status)
    return {"error": text, "error_type": error_type}


async def on_http_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer what the router refuses (404, 405) in the same shape."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    text = f"{request.method} {path}: {error.detail}"
    body = _error_body(path, text, "validation", error.status_code)
    return JSONResponse(body, error.status_code, error.headers)


async def on_disconnect(request: HTTPRequest, _error: Exception) -> Response:
    """End a request whose client left before its body had come; the response goes nowhere."""
    request.state.error = errors.ClientGone("the client hung up")
    return Response(status_code=STATUS[errors.ClientGone])


async def on_bug(request: HTTPRequest, _error: Exception) -> Response:
    """Answer an error of our own; uvicorn logs the traceback next."""
    logger.error("request %s: internal error", request.state.request_id)
    headers = {"x-request-id": request.state.request_id}
    body = _error_body(request.scope["path"], "internal error", "backend", 500)
    return JSONResponse(body, 500, headers)


def create_app(
    settings: Settings, load: Callable[[Settings], Model | Generator] | None = None
) -> Starlette:
    """Return the application.

    Args:
        settings: All of its options.
        load: Returns the model that settings name, in the model thread; None: a pipeline.
    """
    load = load or load_pipeline
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        queue = RequestQueue(settings, metrics)
        worker = Worker(settings, queue, partial(load, settings))
        reloader = Reloader(settings, queue, worker, load)
        app.state.service = behind = Service(settings, queue, worker, reloader)
        metrics.watch(behind.readings, behind.model_labels)
        task = asyncio.create_task(worker.run(), name="worker")
        with supervise(behind, task):
            yield
            await queue.drain(settings.drain_timeout_s)  # under uvicorn, done before it comes here
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    app = Starlette(
        routes=[
            Route("/", Root),
            *(
                Route(path, endpoints.predict, methods=["POST"])
                for path in endpoints.PREDICT
                if path != "/"
            ),
            Route(endpoints.EMBEDDINGS, endpoints.embeddings, methods=["POST"]),
            *(Route(path, endpoints.generate, methods=["POST"]) for path in endpoints.GENERATE),
            *(
                Route(path, endpoints.complete, methods=["POST"])
                for path in (endpoints.COMPLETIONS, endpoints.CHAT)
            ),
            Route("/v1/models", endpoints.models),
            *(Route(path, ready) for path in ("/health", "/readyz", "/ping")),
            Route("/livez", live),
            Route("/info", info),
            Route("/metrics", scrape),
            Route(admin.RELOAD, admin.reload, methods=["POST"]),
            Route("/openapi.json", openapi_document),
            Route("/docs", docs),
        ],
        middleware=[
            *cross_origin(settings),
            Middleware(
                http.Door,
                paths=endpoints.INFERENCE,
                refusal=partial(refusal, settings),
                metrics=metrics,
            ),
            Middleware(RequestLog, paths=endpoints.INFERENCE, metrics=metrics),
            Middleware(connections.Readers),
            Middleware(connections.Connections),
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


def cross_origin(settings: Settings) -> list[Middleware]:
    """Let pages of CORS_ORIGINS ask; without any, browsers keep pages from elsewhere out."""
    if settings.cors_origins is None:
        return []
    origins = [origin.strip() for origin in settings.cors_origins.split(",")]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id", "x-request-timeout"),
            expose_headers=(*EXPOSED, "retry-after"),
        )
    ]


def load_pipeline(settings: Settings) -> Model | Generator:
    """Import torch and load the model, in the model thread: the port is open long before."""
    prepare_allocator()
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
