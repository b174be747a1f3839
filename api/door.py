"""The door: refuses inference while the queue is full, before anything is parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import telemetry
from errors import Overloaded
from metrics import Metrics

logger = logging.getLogger(__name__)

LOG_EVERY_S = 1.0
SHORT_BODY_BYTES = 16_384


class Door:
    """ASGI middleware, outside of all but CORS: while the queue is full, inference is refused here.

    At many times the rate that the model can take, to refuse is most of the work, and the model
    gets what it leaves of the processor. So it is done in the fewest steps: nothing is parsed, and
    a line per second in the log says how many were refused (a line for each at level debug).

    Args:
        paths: Of inference.
        refusal: Makes the answer to `Overloaded` at a path.
        metrics: Count the refusals.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        refusal: Callable[[str, Overloaded], Response],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._paths = paths
        self._refusal = refusal
        self._metrics = metrics
        self._refused = 0
        self._answers: dict[tuple[str, int], Response] = {}  # seconds until a retry are few

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app unless the queue is full."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            self._tell()
            return
        path = telemetry.route_path(scope)
        if scope["type"] != "http" or path not in self._paths or not _is_short(scope):
            await self._app(scope, receive, send)
            return
        overloaded = scope["app"].state.service.queue.overloaded()
        if overloaded is None:
            await self._app(scope, receive, send)
            return
        key = path, overloaded.retry_after_s
        response = self._answers.get(key)
        if response is None:
            response = self._answers[key] = self._refusal(key[0], overloaded)
        status, request_id = response.status_code, telemetry.request_id(scope)
        self._note(scope, status, request_id, overloaded)
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    def _note(self, scope: Scope, status: int, request_id: str, overloaded: Overloaded) -> None:
        """Count a refusal; the first one of a second sees to it that the log tells."""
        self._metrics.count_request(status, overloaded, 0.0)
        self._refused += 1
        if self._refused == 1:
            asyncio.get_running_loop().call_later(LOG_EVERY_S, self._tell)
        if logger.isEnabledFor(logging.DEBUG):
            facts = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "outcome": overloaded.outcome,
                "cause": str(overloaded),
            }
            logger.debug("request %s: %s", request_id, overloaded, extra={"facts": facts})

    def _tell(self) -> None:
        """Log how many were refused since the last time; also when the server has stopped."""
        if not self._refused:
            return
        logger.warning("the queue is full: %d requests refused", self._refused)
        self._refused = 0


def _is_short(scope: Scope) -> bool:
    """Tell whether this is a POST whose body has come with its head, or nearly."""
    if scope["method"] != "POST":
        return False
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return length.isdigit() and int(length) <= SHORT_BODY_BYTES
