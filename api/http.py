"""What every wire format shares: the key, the deadline, the body, and the client that hangs up."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pydantic import SecretStr
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import telemetry
from config import Settings, each_key
from entries import Request
from errors import (
    DeadlinePassed,
    Overloaded,
    Rejected,
    TooLarge,
    Unauthorized,
    UnsupportedType,
)
from metrics import Metrics

logger = logging.getLogger(__name__)

LOG_EVERY_S = 1.0
SHORT_BODY_BYTES = 16_384
WATCH_AFTER_S = 0.05


class Door:
    """ASGI middleware, the outermost: while the queue is full, inference is refused here.

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
        if scope["type"] != "http" or scope["path"] not in self._paths or not _is_short(scope):
            await self._app(scope, receive, send)
            return
        overloaded = scope["app"].state.service.queue.overloaded()
        if overloaded is None:
            await self._app(scope, receive, send)
            return
        request_id = telemetry.request_id(scope)
        if logger.isEnabledFor(logging.DEBUG):
            facts = {"request_id": request_id, "path": scope["path"], "outcome": overloaded.outcome}
            logger.debug("request %s: %s", request_id, overloaded, extra={"facts": facts})
        self._count()
        key = scope["path"], overloaded.retry_after_s
        response = self._answers.get(key)
        if response is None:
            response = self._answers[key] = self._refusal(key[0], overloaded)
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode())]
        status = response.status_code
        self._metrics.count_request(status, overloaded, 0.0)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    def _count(self) -> None:
        """Count a refusal; the first one of a second sees to it that the log tells."""
        self._refused += 1
        if self._refused == 1:
            asyncio.get_running_loop().call_later(LOG_EVERY_S, self._tell)

    def _tell(self) -> None:
        logger.warning("the queue is full: %d requests refused", self._refused)
        self._refused = 0


def _is_short(scope: Scope) -> bool:
    """Tell whether this is a POST whose body has come with its head, or nearly."""
    if scope["method"] != "POST":
        return False
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return length.isdigit() and int(length) <= SHORT_BODY_BYTES


def authorize(request: HTTPRequest, keys: SecretStr | None) -> None:
    """Compare the Bearer key with each of `keys`, in constant time.

    Raises:
        Unauthorized: There are keys and the request carries none of them.
    """
    if keys is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = key.strip().encode()
    known = [hmac.compare_digest(given, each.encode()) for each in each_key(keys)]
    if scheme.lower() != "bearer" or not any(known):
        wrong = scheme.lower() == "bearer" and given
        raise Unauthorized(
            "the key is wrong" if wrong else "send the key as `Authorization: Bearer …`"
        )


def timeout_s(request: HTTPRequest, settings: Settings) -> float:
    """Return REQUEST_TIMEOUT_S, or the shorter X-Request-Timeout (seconds) of the client.

    Raises:
        Rejected: The header is not a positive number.
    """
    given = request.headers.get("x-request-timeout")
    if given is None:
        return settings.request_timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise Rejected("X-Request-Timeout: send a positive number of seconds")
    return min(seconds, settings.request_timeout_s)


async def read_body(request: HTTPRequest, max_bytes: int, deadline: float) -> bytes:
    """Read the body, and stop as soon as it is known to be too large.

    Raises:
        UnsupportedType: It is compressed.
        TooLarge: It is announced with, or has come to, more than `max_bytes`.
        DeadlinePassed: The rest did not come in time.
        ClientDisconnect: The client hung up.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedType("content-encoding: send the body as it is")
    too_large = TooLarge(f"the body is larger than {max_bytes} bytes")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise DeadlinePassed("the deadline passed before the body had come") from None
    return bytes(body)


@contextmanager
def watching(request: HTTPRequest, pending: Request) -> Iterator[None]:
    """Give `pending` up when the client hangs up before the block ends.

    uvicorn never cancels a handler, and `is_disconnected` is blind behind some middleware. The
    watch begins after WATCH_AFTER_S, to spare most requests a task of their own.
    """
    tasks: list[asyncio.Task[None]] = []
    timer = asyncio.get_running_loop().call_later(
        WATCH_AFTER_S, lambda: tasks.append(asyncio.create_task(_watch(request, pending)))
    )
    try:
        yield
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()


async def _watch(request: HTTPRequest, pending: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    pending.hang_up()
