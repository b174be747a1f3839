"""The HTTP side: routes, lifespan, and the status of every error. `uvicorn server:app`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import errors
from api import about, admin, connections, door, endpoints, openai
from config import ConfigurationError, Settings, load_settings, prepare_allocator
from lifecycle import supervise
from metrics import Metrics
from model import Generator, Model
from queueing import RequestQueue
from reloading import Reloader
from service import Service, service
from telemetry import RequestLog, configure_logging, route_path
from worker import Worker

logger = logging.getLogger(__name__)

STATUS: Mapping[type[errors.RequestError], int] = {
    errors.Malformed: 400,
    errors.Empty: 400,
    errors.Unauthorized: 401,
    errors.Conflict: 409,
    errors.TooLarge: 413,
    errors.UnsupportedType: 415,
    errors.Rejected: 422,
    errors.ModelFailed: 424,
    errors.ClientGone: 499,  # never sent, but logged
    errors.Interrupted: 500,
    errors.Overloaded: 503,  # or OVERLOAD_STATUS
    errors.NotServing: 503,
    errors.DeadlinePassed: 504,
}

EXPOSED = (
    *("x-request-id", "x-queue-time", "x-inference-time", "x-total-time", "x-batch-size"),
    *("x-first-token-time", "x-time-per-token", "retry-after"),
)


async def on_request_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer a `RequestError`; leave it for log and metrics."""
    assert isinstance(error, errors.RequestError)
    request.state.error = error
    return refusal(service(request).settings, route_path(request.scope), error)


def refusal(settings: Settings, path: str, error: errors.RequestError) -> Response:
    """Return the answer to `error`, in the words of the wire format of `path`."""
    status = status_of(settings, type(error))
    headers = {}
    if isinstance(error, errors.Unavailable):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(_error_body(path, str(error), error.error_type, status), status, headers)


def status_of(settings: Settings, error: type[errors.RequestError]) -> int:
    """Return the status that an error is answered with."""
    return settings.overload_status if error is errors.Overloaded else STATUS[error]


def _error_body(path: str, text: str, error_type: str, status: int) -> Mapping[str, Any]:
    if path.startswith(openai.PREFIX):
        return openai.error_body(text, error_type, status)
    return {"error": text, "error_type": error_type}


async def on_http_error(request: HTTPRequest, error: Exception) -> Response:
    """Answer what the router refuses (404, 405) in the same shape."""
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    request.state.cause = error.detail
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
    body = _error_body(route_path(request.scope), "internal error", "backend", 500)
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
    metrics.expect(200, "ok")
    for error in STATUS:
        metrics.expect(status_of(settings, error), error.outcome)

    app = Starlette(
        routes=routes(),
        middleware=[
            *cross_origin(settings),
            Middleware(
                door.Door,
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
        lifespan=partial(lifespan, settings, load, metrics),
    )
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def lifespan(
    settings: Settings,
    load: Callable[[Settings], Model | Generator],
    metrics: Metrics,
    app: Starlette,
) -> AsyncIterator[None]:
    """Run the worker from the start of `app` until it has answered all that it admitted."""
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


def routes() -> list[Route]:
    """Return every path, and who answers there."""
    answers = {
        endpoints.predict: endpoints.PREDICT[1:],  # "/" has a page, too
        endpoints.generate: endpoints.GENERATE,
        endpoints.complete: (endpoints.COMPLETIONS, endpoints.CHAT),
        endpoints.embeddings: (endpoints.EMBEDDINGS,),
        admin.reload: (admin.RELOAD,),
    }
    tells = {
        endpoints.models: ("/v1/models", "/v1/models/{model_id:path}"),
        about.ready: ("/health", "/readyz", "/ping"),
        about.live: ("/livez",),
        about.info: ("/info",),
        about.scrape: ("/metrics",),
        about.openapi_document: ("/openapi.json",),
        about.docs: ("/docs",),
    }
    return [
        Route("/", about.Root),
        *(Route(path, each, methods=["POST"]) for each, paths in answers.items() for path in paths),
        *(Route(path, each) for each, paths in tells.items() for path in paths),
    ]


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
            allow_headers=("*",),  # clients of other services send some of their own
            expose_headers=EXPOSED,
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
