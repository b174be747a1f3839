"""What every wire format shares: the key, the deadline, the body, and the client that hangs up."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import SecretStr
from starlette.requests import Request as HTTPRequest

from config import Settings, each_key
from entries import Request
from errors import DeadlinePassed, Rejected, TooLarge, Unauthorized, UnsupportedType

WATCH_AFTER_S = 0.05


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
