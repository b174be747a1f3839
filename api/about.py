"""What the server tells of itself: pages, probes, facts, metrics, and its OpenAPI document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, Response

import errors
from api import endpoints, http, openapi
from api.tasks import FORMATS
from metrics import CONTENT_TYPE
from model import Generator
from service import model_info, service

VERSION = "0.1.0"
WEB = Path(__file__).parent.parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

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
        mask_token=model.get("mask_token"),
        chats=model.get("chat", False),
        keyed=service(request).settings.api_key is not None,
    )
    return JSONResponse(openapi.document(served))


async def docs(_request: HTTPRequest) -> Response:
    """Show the description to people."""
    return FileResponse(WEB / "docs.html", headers=PAGE_HEADERS)
