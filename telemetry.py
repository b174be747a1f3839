"""Request ids and logs."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Collection, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO
from random import getrandbits
from typing import Any, TextIO

import pydantic_core
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config import Settings
from metrics import Metrics, outcome_of

logger = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Visible ASCII: cannot break a header or a log line.
USABLE_ID = re.compile(rb"[!-~]{1,128}")
TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(-|$)"
)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, facts of the request, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Write `record` as JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return pydantic_core.to_json(line, fallback=str).decode()


class TurnHandler(logging.StreamHandler[StringIO]):
    """Writes at once what one turn of the event loop has logged.

    To write lets go of the interpreter, and the model thread takes it. A write for each of the 32
    answers of a batch would be 32 turns to wait for.
    """

    def __init__(self, output: TextIO) -> None:
        super().__init__(StringIO())
        self._output = output
        self._scheduled_on: asyncio.AbstractEventLoop | None = None

    def flush(self) -> None:
        """Write soon; at once where no event loop runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._write()
            return
        if self._scheduled_on is not loop:
            self._scheduled_on = loop
            loop.call_soon(self._write)

    def close(self) -> None:
        """Write what is left."""
        self._write()
        super().close()

    def _write(self) -> None:
        assert self.lock is not None
        with self.lock:
            self._scheduled_on = None
            text = self.stream.getvalue()
            self.stream.seek(0)
            self.stream.truncate()
            with suppress(OSError, ValueError):  # to log that would come back here, for ever
                self._output.write(text)
                self._output.flush()


def configure_logging(settings: Settings) -> None:
    """Send all log records of this process, uvicorn's too, to standard error in one format."""
    output = TurnHandler(sys.stderr)
    output.setFormatter(
        JsonFormatter() if settings.log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[output], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        uvicorn_logger = logging.getLogger(name)
        uvicorn_logger.handlers.clear()
        uvicorn_logger.setLevel(logging.NOTSET)
        uvicorn_logger.propagate = True
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # `RequestLog` says more
    # No format shows where a record was made; to find out would be a third of its cost.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def request_id(scope: Scope) -> str:
    """Return the client's own id of a request if it is usable, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if USABLE_ID.fullmatch(given) else f"{getrandbits(128):032x}"


def route_path(scope: Scope) -> str:
    """Return the path below the one that the server is mounted at (`uvicorn --root-path`)."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def trace(scope: Scope) -> dict[str, str]:
    """Return the ids of the trace that a request belongs to; none if it names none (W3C)."""
    given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    match = TRACEPARENT.match(given)
    if not match or match["trace"] == b"0" * 32 or match["span"] == b"0" * 16:
        return {}
    return {"trace_id": match["trace"].decode(), "parent_span_id": match["span"].decode()}


class RequestLog:
    """ASGI middleware: an id for every request, a line in the log, and of inference the metrics.

    What it tells is in the request's state: the handler of an error leaves it as `error`, or that
    of the router's its `cause`; a route leaves `facts` about the answer. Successful GETs and
    refused probes are logged at level debug.

    Args:
        paths: Of inference.
        metrics: Count it.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._paths = paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put `request_id` into the request's state; add x-request-id and x-total-time (ms)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id(scope)
        status = 500  # unless there is an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", state["request_id"].encode()),
                    (b"x-total-time", b"%.1f" % ((time.perf_counter() - started) * 1000)),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            if route_path(scope) in self._paths and scope["method"] == "POST":
                self._metrics.count_request(status, state.get("error"), seconds)
            _log(scope, status, seconds * 1000)


def _log(scope: Scope, status: int, total_ms: float) -> None:
    """Write the line of one request."""
    quiet = scope["method"] in ("GET", "HEAD") and (status < 400 or status == 503)
    level = logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    state = scope["state"]
    error = state.get("error")
    facts = {
        "request_id": state["request_id"],
        **trace(scope),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "outcome": outcome_of(status, error),
        "total_ms": round(total_ms, 1),
        **state.get("facts", {}),
    }
    text = "request %(request_id)s: %(method)s %(path)r %(status)d in %(total_ms).1f ms"
    if "facts" in state:
        text += ": queue %(queue_ms).1f, inference %(inference_ms).1f, batch of %(batch_size)d"
    if (cause := error or state.get("cause")) is not None:
        facts["cause"] = str(cause)
        text += ", %(outcome)s: %(cause)s"
    logger.log(level, text, facts, extra={"facts": facts})
