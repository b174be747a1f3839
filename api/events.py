"""Server-sent events: an answer in pieces, over one response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, MutableMapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, Protocol, TypeAlias

from starlette.responses import Response as HTTPResponse
from starlette.types import Receive, Scope, Send

from api.bodies import facts, to_json
from entries import Part, Response
from errors import ClientGone, RequestError

HEARTBEAT_S = 10.0  # proxies give up on a silent answer after a minute, some after half
HEARTBEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
Pieces: TypeAlias = AsyncGenerator[Response | Part | None]


class Dialect(Protocol):
    """How a wire format writes an answer that comes in pieces: each item is one event."""

    def opening(self) -> Iterable[Any]:
        """Return what comes first."""

    def part(self, part: Part) -> Iterable[Any]:
        """Return what tells of a piece."""

    def end(self, response: Response) -> Iterable[Any]:
        """Return what tells that an answer is whole."""

    def closing(self) -> Iterable[Any]:
        """Return what comes when all answers are whole."""

    def failure(self, error: RequestError) -> Any:
        """Return what tells that there will be no answer."""


class EventStream(HTTPResponse):
    """An answer that is sent as events while it is made.

    Args:
        first: What has come of it.
        rest: What will come; closed at the end, whatever that is.
        dialect: Of the client.
        watch: Entered while it is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Response | Part | None,
        rest: Pieces,
        dialect: Dialect,
        watch: AbstractContextManager[None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._dialect = dialect
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each event as it comes."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        state = scope["state"]
        async with aclosing(self._rest), aclosing(self._written(state)) as events:
            with self._watch:
                await send({"type": "http.response.start", **head})
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    if "error" in state:  # this was the last one, or nobody reads on
                        break
        await send({"type": "http.response.body"})

    async def _written(self, state: MutableMapping[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the events; leave in the request's state what the log is to tell of them."""
        whole: list[Response] = []
        try:
            yield _events(self._dialect.opening())
            yield self._one(self._first)
            async for each in self._rest:
                if isinstance(each, Response):
                    whole.append(each)
                    state["facts"] = facts(whole)
                yield self._one(each)
            yield _events(self._dialect.closing()) + DONE
        except RequestError as error:
            state["error"] = error
            if not isinstance(error, ClientGone):
                yield _events([self._dialect.failure(error)])

    def _one(self, each: Response | Part | None) -> bytes:
        if each is None:
            return HEARTBEAT
        if isinstance(each, Part):
            return _events(self._dialect.part(each))
        return _events(self._dialect.end(each))


def _events(values: Iterable[Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % to_json(value) for value in values)
