"""Request ids and logs."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime
from random import getrandbits
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config import Settings

logger = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Visible ASCII: cannot break a header or a log line.
USABLE_ID = re.compile(rb"[!-~]{1,128}")


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
        return json.dumps(line, ensure_ascii=False)


def configure_logging(settings: Settings) -> None:
    """Send all log records of this process, uvicorn's too, to standard error in one format."""
    output = logging.StreamHandler()
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


def request_id(scope: Scope) -> str:
    """Return the client's own id of a request if it is usable, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if USABLE_ID.fullmatch(given) else f"{getrandbits(128):032x}"


class RequestLog:
    """ASGI middleware: an id for every request, the client's own if usable, and a line in the log.

    Successful GETs and refused probes are logged at level debug.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put `request_id` into the request's state; add x-request-id and x-total-time (ms)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                total_ms = (time.perf_counter() - started) * 1000
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", state["request_id"].encode()),
                    (b"x-total-time", b"%.1f" % total_ms),
                ]
                _log(scope, message["status"], total_ms)
            await send(message)

        await self._app(scope, receive, send_with_id)


def _log(scope: Scope, status: int, total_ms: float) -> None:
    """Write the line of one request; the handler of its error may have left a `cause`."""
    quiet = scope["method"] in ("GET", "HEAD") and (status < 400 or status == 503)
    level = logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    facts = {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "total_ms": round(total_ms, 1),
    }
    text = "request %(request_id)s: %(method)s %(path)r %(status)d in %(total_ms).1f ms"
    if "cause" in scope["state"]:
        facts["cause"] = scope["state"]["cause"]
        text += " %(cause)s"
    logger.log(level, text, facts, extra={"facts": facts})
