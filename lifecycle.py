"""The life of the process under uvicorn: signals, drain, exit codes. Other hosts have their own."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protocol import BoundedHeads
from queueing import RequestQueue, State
from service import Service
from worker import Worker

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
FLUSH_S = 0.5  # time for the last answers to leave the process


class Supervisor:
    """Stops uvicorn on a signal or when the worker ends, and bounds how long that may take."""

    def __init__(self, server: uvicorn.Server, queue: RequestQueue, drain_timeout_s: float) -> None:
        self.exit_code = 0
        self._server = server
        self._queue = queue
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._late: list[asyncio.Task[Any]] = []

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Drain on the first signal, end at once on the second.

        This replaces uvicorn's own handler, which raises the signal again after a clean shutdown
        and so turns exit code 0 into death by signal.
        """
        if not self._server.should_exit:
            self._server.should_exit = True
            self._loop.call_soon_threadsafe(self._stop)
        elif multiprocessing.parent_process() is None:
            end_process(128 + number)
        # else uvicorn's --workers or --reload passes on what the whole group has got already

    def on_worker_end(self, worker_task: asyncio.Task[None]) -> None:
        """Stop with exit code 1 when the worker has failed; it has said why."""
        if not worker_task.cancelled() and worker_task.exception():
            self.exit_code = 1
            self._stop()

    def watch(self, worker: Worker) -> None:
        """End the process when a call of the model hangs: nothing else can end the call."""
        if worker.alive() or self._queue.state is State.DEAD:
            self._loop.call_later(WATCH_EVERY_S, self.watch, worker)
            return
        logger.critical("the model makes no progress: the process ends")
        self._queue.close()
        self._loop.call_later(FLUSH_S, end_process, 1)

    def _stop(self) -> None:
        logger.info("stopping: %d requests have no answer yet", len(self._queue.in_flight))
        self._queue.stop_admitting()
        self._server.should_exit = True
        self._late = close_port(self._server)
        self._loop.call_later(self._drain_timeout_s, self._cut_off)

    def _cut_off(self) -> None:
        unanswered = len(self._queue.in_flight)
        logger.error(
            "drain timed out after %g s: %d requests cut off", self._drain_timeout_s, unanswered
        )
        self.exit_code = self.exit_code or int(unanswered > 0)
        self._queue.refuse_all()
        self._loop.call_later(FLUSH_S, end_process, self.exit_code)


@contextmanager
def supervise(service: Service, worker_task: asyncio.Task[None]) -> Iterator[None]:
    """Tie the process to the worker while uvicorn runs the app; do nothing under another host.

    A first SIGTERM or SIGINT stops admission and lets uvicorn shut down: exit code 0. A second one
    ends the process at once. What has no answer after `drain_timeout_s` is refused: exit code 1.
    SIGHUP loads the model anew, unless it can mean that a terminal was closed. When `worker_task`,
    which runs `worker.run()`, fails, or a call of the model hangs: exit code 1.
    """
    server = _uvicorn_server()
    if server is None:
        yield
        return
    worker, reloader = service.worker, service.reloader
    supervisor = Supervisor(server, service.queue, service.settings.drain_timeout_s)
    worker_task.add_done_callback(supervisor.on_worker_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.on_signal)
    if hasattr(signal, "SIGHUP") and not os.isatty(0):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.on_hangup)
    supervisor.watch(worker)
    if server.config.http_protocol_class is HttpToolsProtocol:  # h11 has bounds of its own
        server.config.http_protocol_class = BoundedHeads
    yield
    if supervisor.exit_code or worker.busy_since is not None or reloader.busy:
        end_process(supervisor.exit_code)


def close_port(server: uvicorn.Server) -> list[asyncio.Task[Any]]:
    """Let in who has connected, and nobody more.

    Whom the kernel has accepted and the process has not, a close would reset, after the request was
    sent perhaps. Only before a request is sent can a proxy take it elsewhere.

    Returns:
        What lets them in; to be kept until it is done.
    """
    config, loop = server.config, asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        state = server.lifespan.state
        return config.http_protocol_class(config, server.server_state, state)  # type: ignore[call-arg]

    tasks = []
    for listener in getattr(server, "servers", ()):  # none while uvicorn starts
        for each in listener.sockets:
            with socket.socket(fileno=os.dup(each.fileno())) as port, suppress(OSError):
                while True:
                    late = loop.connect_accepted_socket(protocol, port.accept()[0], ssl=config.ssl)
                    tasks.append(asyncio.create_task(late))
        listener.close()
    return tasks


def end_process(code: int) -> NoReturn:
    """End the process now; the interpreter's own exit would first wait for the model thread."""
    logging.shutdown()
    os._exit(code)


def _uvicorn_server() -> uvicorn.Server | None:
    """Return the server that handles this process's signals, if it is uvicorn's."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, uvicorn.Server) else None
