"""How connections end: mannerly, and whatever the client does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errors import ClientGone
from queueing import State

LINGER_S = 2.0
STALLED_S = 30.0


class Connections:
    """ASGI middleware: how a connection ends.

    An answer that comes before the body was read is not lost to the client: to close a connection
    while bytes come in resets it, and the reset can overtake the answer. So the rest of the body is
    read and thrown away, for LINGER_S at most, before the answer ends.

    A server that drains says `connection: close`, so that the client does not try it again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; hold the end of its answer back until the body has come."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body_ended = not _has_body(scope)

        async def watched_receive() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)
            return message

        async def mannered_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["app"].state.service.queue.state is State.DRAINING:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            elif not body_ended and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while not body_ended:
                            await watched_receive()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, watched_receive, mannered_send)


class Readers:
    """ASGI middleware: a client that does not read its answer holds nothing up.

    What it has not taken in STALLED_S it does not get, nor what comes after it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; send for so long as somebody reads."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stalled = False

        async def patient_send(message: Message) -> None:
            nonlocal stalled
            if stalled:
                return
            try:
                async with asyncio.timeout(STALLED_S):
                    await send(message)
            except TimeoutError:
                stalled = True
                scope["state"]["error"] = ClientGone("the client does not read its answer")

        await self._app(scope, receive, patient_send)


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
