"""A server in a thread of this process, which has torch already: it starts in a second.

For tests of what is answered. Signals, exit codes and logs need a process (`tests.processes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from config import Settings
from model import Generator, Model
from server import create_app, load_pipeline
from tests.models import BUNDLED
from tests.servers import Server, free_port


@dataclass
class Thread(Server):
    thread: threading.Thread = field(kw_only=True)

    def running(self) -> bool:
        return self.thread.is_alive()


Load = Callable[[Settings], Model | Generator]


def after(opened: threading.Event) -> Load:
    """Return what loads a model as soon as `opened` is set."""

    def load(settings: Settings) -> Model | Generator:
        assert opened.wait(30)
        return load_pipeline(settings)

    return load


@contextmanager
def serving(
    load: Load = load_pipeline, *, ready: bool = True, **settings: object
) -> Iterator[Server]:
    """Serve a model, by default the bundled one, until the end of the block.

    Args:
        load: As `server.create_app` wants it.
        ready: Wait until it is.
        settings: Of the server.
    """
    port = free_port()
    given = {"model_id": BUNDLED, "device": "cpu", **settings}
    app = create_app(Settings.model_validate(given), load)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    running = Thread(port, thread=threading.Thread(target=server.run))
    running.thread.start()
    try:
        running.wait_until_open()
        if ready:
            running.wait_until_ready()
        yield running
    finally:
        running.leave()
        server.should_exit = True
        running.thread.join()
