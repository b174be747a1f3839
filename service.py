"""What runs behind the routes, and how a route finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HTTPRequest

from batching import Worker
from config import Settings
from queueing import RequestQueue


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


def model_info(request: HTTPRequest) -> Mapping[str, Any]:
    """Return the facts of the model; nothing while it is loading."""
    model = service(request).worker.model
    return model.info if model else {}
