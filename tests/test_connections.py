"""Clients that send slowly, without end, or nothing, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from api import connections
from errors import ClientGone
from tests.processes import server
from tests.servers import Server

HALF_OPEN = 200
BEGINNINGS = [
    b"",
    b"POST / HT",
    b"POST / HTTP/1.1\r\nhost: x\r\nx-a",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc",
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with server("tests.apps:hurried", folder, batch_s=0, request_timeout_s=2) as running:
        running.wait_until_ready()
        yield running


def answer_on(connection: socket.socket) -> tuple[int, Any]:
    response = HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def chunked(running: Server, begun: bytes = b"") -> socket.socket:
    """Begin a request whose body comes in chunks."""
    connection = running.connect()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    connection.sendall(head + begun)
    return connection


def test_half_open_clients_stop_nobody_and_are_closed(running: Server) -> None:
    half_open = [running.connect() for _ in range(HALF_OPEN)]
    for number, connection in enumerate(half_open):
        connection.sendall(BEGINNINGS[number % len(BEGINNINGS)])
    for _ in range(20):
        started = time.monotonic()
        assert running.post("others").json() == "OTHERS"
        assert running.get("/livez").status_code == 200
        assert time.monotonic() - started < 0.9  # the half-open ones wait for longer
    begun = [each for number, each in enumerate(half_open) if BEGINNINGS[number % len(BEGINNINGS)]]
    assert [answer_on(each)[0] for each in begun] == [408, 408, 504] * (HALF_OPEN // 4)
    assert all(connection.recv(1) == b"" for connection in half_open[:3])


def test_head_without_end_is_refused(running: Server) -> None:
    connection = running.connect()
    connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\n")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(b"x: a\r\n" * 10_000_000)
    assert running.post("others").status_code == 200


def test_trailers_without_end_are_refused(running: Server) -> None:
    connection = chunked(running, b"1\r\na\r\n0\r\n")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(b"x: a\r\n" * 10_000_000)
    assert running.post("others").status_code == 200


def test_slow_trailers_are_told_so(running: Server) -> None:
    connection = chunked(running, b"1\r\na\r\n0\r\nx: ")
    assert answer_on(connection)[0] == 504


def test_a_chunk_may_wait_for_longer_than_a_head(running: Server) -> None:
    connection = chunked(running, b"1\r\n")
    time.sleep(1.2)
    connection.sendall(b"a\r\n0\r\n\r\n")
    assert answer_on(connection) == (200, "A")


def test_chunks_that_are_cut_anywhere_are_a_body(running: Server) -> None:
    text = b"a long text " * 20_000
    size = b"%x\r\n" % 100_000
    parts = [text[:100_000], text[100_000:200_000], text[200_000:]]
    chunks = [size + parts[0] + b"\r\n" + size, parts[1] + b"\r\n", b"%x\r\n" % len(parts[2])]
    connection = chunked(running)
    for piece in (*chunks, parts[2] + b"\r\n0\r\n", b"x: a\r\n", b"\r\n"):
        connection.sendall(piece)
        time.sleep(0.05)
    assert answer_on(connection) == (200, text.decode().upper())


def test_large_head_is_told_so(running: Server) -> None:
    connection = running.connect()
    connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000)
    status, body = answer_on(connection)
    assert (status, body["error_type"]) == (431, "validation")


def test_head_in_two_parts_is_in_time(running: Server) -> None:
    connection = running.connect()
    connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-")
    time.sleep(0.1)
    connection.sendall(b"length: 1\r\n\r\na")
    assert answer_on(connection) == (200, "A")


def test_kept_connection_may_rest_between_requests(running: Server) -> None:
    connection = running.connect()
    for pause_s in (0, 1.2):  # longer than a head may take
        time.sleep(pause_s)
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer_on(connection)[0] == 200


async def stalled(scope: Scope) -> list[Message]:
    """Send three messages to a client that reads the first; return what it got."""
    got: list[Message] = []

    async def send(message: Message) -> None:
        if got:
            await asyncio.sleep(60)
        got.append(message)

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for number in range(3):
            await send({"type": "http.response.body", "number": number})

    async def receive() -> Message:
        return {}

    await connections.Readers(app)(scope, receive, send)
    return got


def test_client_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.05)
    scope: Scope = {"type": "http", "state": {}}
    got = asyncio.run(asyncio.wait_for(stalled(scope), 5))
    assert [message["number"] for message in got] == [0]
    assert isinstance(scope["state"]["error"], ClientGone)
