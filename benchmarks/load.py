"""A load generator for HTTP/1.1: one asyncio protocol per connection, little work per request.

Texts are cycled in a fixed order. Answers are kept as bytes and looked at after the run only, so
that the generator takes as little as it can of the processor that it shares with the server.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

HOST = "127.0.0.1"
DRAIN_S = 60.0
TICK_S = 0.002
SEED = 5
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


class Answer(NamedTuple):
    """What came back for one request.

    Attributes:
        text: Index of the text that was sent.
        status: HTTP status; 0 if the connection broke or no answer came.
        latency_s: From the moment the request was due until its answer was complete.
        at_s: When the answer was complete, since the start of the run.
        body: The answer's body.
        early: Whether the request was one of a burst at the start, which waited less than others.
    """

    text: int
    status: int
    latency_s: float
    at_s: float
    body: bytes
    early: bool = False


@dataclass
class Run:
    """The answers of one run.

    Attributes:
        seconds: How long requests were sent; answers may come later.
        answers: In the order in which they came.
        unsent: Arrivals of an open loop that found no free connection.
        cpu_s: Processor time of the generator.
        start: When it began (perf_counter).
    """

    seconds: float
    answers: list[Answer] = field(default_factory=list)
    unsent: int = 0
    cpu_s: float = 0.0
    start: float = 0.0

    @property
    def rate(self) -> float:
        """Good answers per second, up to the last one that came while requests were sent.

        Dividing by the whole time would count a batch that just missed the end as idleness.
        """
        good = [answer.at_s for answer in self.answers if answer.status == 200]
        in_time = [at_s for at_s in good if at_s <= self.seconds]
        return len(in_time) / max(in_time, default=1.0)

    @property
    def cpu_us(self) -> float:
        """Processor time of the generator per request, in µs."""
        return self.cpu_s / max(len(self.answers), 1) * 1e6

    def latency_ms(self, percent: int) -> float:
        """Return a percentile of the latencies of the good answers that are not early, in ms."""
        good = [answer for answer in self.answers if answer.status == 200]
        latencies_s = [a.latency_s for a in good if not a.early] or [a.latency_s for a in good]
        if len(latencies_s) < 2:
            return sum(latencies_s) * 1000
        return statistics.quantiles(latencies_s, n=100, method="inclusive")[percent - 1] * 1000


def post(body: bytes, path: str = "/", content_type: str = "text/plain") -> bytes:
    """Return the bytes of one request."""
    head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: {content_type}\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), len(body), body)


def parse(received: bytes) -> tuple[int, bytes] | None:
    """Return status and body, or None while the answer is not complete.

    Raises:
        ValueError: The answer says neither its length nor that it comes in chunks.
    """
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return None
    status, body = int(received[9:12]), received[head + 4 :]
    if length := CONTENT_LENGTH.search(received, 0, head):
        return (status, body) if len(body) >= int(length[1]) else None
    if CHUNKED.search(received, 0, head):
        return (status, _join(body)) if body.endswith(b"0\r\n\r\n") else None
    raise ValueError(f"no length in {received[:head]!r}")


def _join(body: bytes) -> bytes:
    """Return the content of chunks, each after its length in hexadecimal."""
    content = b""
    while (end := body.find(b"\r\n")) > 0:
        start, size = end + 2, int(body[:end], 16)
        content += body[start : start + size]
        body = body[start + size + 2 :]
    return content


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request under way.

    Args:
        run: Where answers go.
        idle: Called when an answer has come and the connection can be used again.
    """

    def __init__(self, run: Run, idle: Callable[[Connection], None]) -> None:
        self._run, self._idle = run, idle
        self._text = -1
        self._received = b""
        self._settled: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, text: int, request: bytes, due: float, early: bool = False) -> None:
        """Send the `request` for the text number `text`; it was `due` at (perf_counter)."""
        self._text, self._due, self._early = text, due, early
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect an answer; what comes unasked says that the server closes."""
        if self._text < 0:
            return
        self._received += data
        if answer := parse(self._received):
            self._received = b""
            self._finish(*answer)
            self._idle(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Record an answer that will not come; the connection is not used again."""
        if self._text >= 0:
            self._finish(0, str(error or "connection closed").encode())

    async def settle(self) -> None:
        """Wait for the answer that is on its way, if there is one."""
        if self._text >= 0:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled

    def _finish(self, status: int, body: bytes) -> None:
        now = time.perf_counter()
        answer = Answer(
            self._text, status, now - self._due, now - self._run.start, body, self._early
        )
        self._text = -1
        self._run.answers.append(answer)
        if self._settled and not self._settled.done():
            self._settled.set_result(None)


async def closed_loop(
    port: int, requests: Sequence[bytes], clients: int, seconds: float, limit: int | None = None
) -> Run:
    """Let each of `clients` send its next request as soon as its last one was answered.

    Ends after `seconds`, or `limit` requests; returns when the last answers have come, at most
    DRAIN_S later.
    """
    run = Run(seconds)
    count = 0
    ended = asyncio.Event()

    def ask(connection: Connection) -> None:
        nonlocal count
        now = time.perf_counter()
        if now >= run.start + seconds or count == limit:
            ended.set()
            return
        text = count % len(requests)
        connection.ask(text, requests[text], now, early=count < clients)
        count += 1

    async with _connections(port, clients, run, ask) as connections:
        for connection in connections:
            ask(connection)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
    return run


async def open_loop(
    port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int
) -> Run:
    """Send requests at the times of a Poisson process of `rate` per second, answered or not.

    An arrival never waits: with all `connections` busy it is counted as unsent. Connections that
    the server closed while they were idle are opened anew.
    """
    run = Run(seconds)
    loop = asyncio.get_running_loop()
    rng = random.Random(SEED)
    arrivals = 0
    due_s = rng.expovariate(rate)
    free: list[Connection] = []
    async with _connections(port, connections, run, free.append) as all_of_them:
        free.extend(all_of_them)
        while (now_s := time.perf_counter() - run.start) < seconds:
            while due_s <= now_s:
                text = arrivals % len(requests)
                if free:
                    connection = free.pop()
                    if connection.transport.is_closing():
                        await loop.create_connection(partial(_same, connection), HOST, port)
                    connection.ask(text, requests[text], run.start + due_s)
                else:
                    run.unsent += 1
                arrivals += 1
                due_s += rng.expovariate(rate)
            await asyncio.sleep(TICK_S)
    return run


def _same(connection: Connection) -> Connection:
    return connection


@asynccontextmanager
async def _connections(
    port: int, count: int, run: Run, idle: Callable[[Connection], None]
) -> AsyncIterator[list[Connection]]:
    """Open connections and start the clock; in the end, wait for the answers on their way."""
    loop = asyncio.get_running_loop()
    opened = [
        (await loop.create_connection(lambda: Connection(run, idle), HOST, port))[1]
        for _ in range(count)
    ]
    run.cpu_s, run.start = -time.process_time(), time.perf_counter()
    yield opened
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(each.settle() for each in opened)), DRAIN_S)
    run.cpu_s += time.process_time()
    for connection in opened:
        connection.transport.abort()
    await asyncio.sleep(0)
