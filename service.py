"""What runs behind the routes, and how a route finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HTTPRequest

from config import Settings
from model import Generator
from queueing import RequestQueue, State
from reloading import Reloader
from worker import Worker

LABELS = ("model_id", "revision", "task", "dtype", "device")


@dataclass(frozen=True, slots=True)
class Service:
    """What runs behind the routes; the lifespan puts it on `app.state.service`."""

    settings: Settings
    queue: RequestQueue
    worker: Worker
    reloader: Reloader

    def readings(self) -> Mapping[str, float]:
        """Return how things stand, by the name of the gauge that shows it."""
        model = self.worker.model
        load = dict(model.load) if isinstance(model, Generator) else {}
        return {
            "queue_size": self.queue.depth,
            "in_flight": len(self.queue.in_flight),
            "ready": self.queue.state is State.READY,
            "reloading": self.reloader.busy,
            "max_batch_size": self.worker.batcher.limit.size,
            **(model.memory.usage() if model else {}),
            **load,
        }

    def model_labels(self) -> Mapping[str, str]:
        """Return what tells models apart."""
        facts = self.worker.model.info if self.worker.model else {}
        return {name: str(facts.get(name) or "") for name in LABELS}


def service(request: HTTPRequest) -> Service:
    """Return what runs behind the route of `request`."""
    found: Service = request.app.state.service
    return found


def model_info(request: HTTPRequest) -> Mapping[str, Any]:
    """Return the facts of the model; nothing while it is loading."""
    model = service(request).worker.model
    return model.info if model else {}
