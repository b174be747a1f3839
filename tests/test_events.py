"""Answers as server-sent events: in order, never silent for long, and closed whatever happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import nullcontext
from typing import Any

import pytest

from api.events import EventStream
from entries import Part, Response
from errors import ClientGone, DeadlinePassed
from model import Piece, Token

pytestmark = pytest.mark.anyio
PART = Part(0, Piece([Token(1, "a")], last=False))
WHOLE = Response(0, "whole", 1, 0, 0, 0, 0, 1)


class Plain:
    """Writes every kind of event as its name."""

    def opening(self) -> Iterable[Any]:
        return ["opening"]

    def part(self, part: Part) -> Iterable[Any]:
        return [part.piece.text]

    def end(self, response: Response) -> Iterable[Any]:
        return [response.output]

    def closing(self) -> Iterable[Any]:
        return ["closing"]

    def failure(self, error: Exception) -> Any:
        return str(error)


class Source:
    """What comes of an answer: items, the last of which may be an error; tells if it was closed."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.closed = False

    async def stream(self) -> AsyncGenerator[Any]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def sent(source: Source, breaks_at: int = 100) -> bytes:
    """Return what is sent of a source; sending fails at a message."""
    stream = source.stream()
    response = EventStream(await anext(stream), stream, Plain(), nullcontext())
    messages: list[Any] = []

    async def send(message: Any) -> None:
        if len(messages) == breaks_at:
            raise OSError("the client is gone")
        messages.append(message)

    await response({"type": "http", "state": {}}, None, send)  # type: ignore[arg-type]
    assert messages[0]["type"] == "http.response.start"
    assert not messages[-1].get("more_body", False)
    return b"".join(message.get("body", b"") for message in messages)


async def test_events_come_in_order_with_a_comment_in_silence() -> None:
    source = Source(None, PART, None, WHOLE)
    assert await sent(source) == (
        b'data: "opening"\n\n: waiting\n\ndata: "a"\n\n: waiting\n\ndata: "whole"\n\n'
        b'data: "closing"\n\ndata: [DONE]\n\n'
    )
    assert source.closed


async def test_a_client_that_reads_no_more_ends_the_answer() -> None:
    source = Source(PART, PART, PART, WHOLE)
    stream = source.stream()
    response = EventStream(await anext(stream), stream, Plain(), nullcontext())
    state: dict[str, Any] = {}
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)
        if message.get("body") == b'data: "a"\n\n':
            state["error"] = ClientGone("the client does not read its answer")

    await response({"type": "http", "state": state}, None, send)  # type: ignore[arg-type]
    bodies = [message.get("body") for message in messages]
    assert bodies == [None, b'data: "opening"\n\n', b'data: "a"\n\n', None]
    assert source.closed


async def test_the_log_learns_of_all_answers_of_a_stream() -> None:
    stream = Source(PART, WHOLE, WHOLE).stream()
    response = EventStream(await anext(stream), stream, Plain(), nullcontext())
    state: dict[str, Any] = {}

    async def send(_message: Any) -> None:
        pass

    await response({"type": "http", "state": state}, None, send)  # type: ignore[arg-type]
    assert state["facts"]["inputs"] == 2


async def test_an_error_is_the_last_event() -> None:
    body = await sent(Source(PART, DeadlinePassed("too late")))
    assert body.endswith(b'data: "too late"\n\n')
    assert b"DONE" not in body


async def test_nobody_is_told_that_the_client_is_gone() -> None:
    assert (await sent(Source(PART, ClientGone("gone")))).endswith(b'data: "a"\n\n')


@pytest.mark.parametrize("message", range(5))
async def test_the_answer_is_given_up_if_it_cannot_be_sent(message: int) -> None:
    source = Source(PART, PART, PART, WHOLE)
    with pytest.raises(OSError, match="gone"):
        await sent(source, breaks_at=message)
    assert source.closed
