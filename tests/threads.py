"""A server in a thread of this process, which has torch already: it starts in a second.

For tests of what is answered. Signals, exit codes and logs need a process (`tests.processes`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from config import Settings
from model import Generator, Model
from server import create_app, load_pipeline
from tests.models import BUNDLED
from tests.servers import Server

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
    given = {"model_id": BUNDLED, "device": "cpu", **settings}
    app = create_app(Settings.model_validate(given), load)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    running = Server(server.servers[0].sockets[0].getsockname()[1])
    try:
        if ready:
            running.wait_until_ready()
        yield running
    finally:
        running.leave()
        server.should_exit = True
        thread.join()
