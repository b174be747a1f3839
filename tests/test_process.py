"""A real uvicorn: start, stop, signals, sockets, floods and hang-ups."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from transformers import pipeline

from lifecycle import close_port
from tests.processes import ROOT, Process, command, environment, server
from tests.servers import Server, free_port

BUNDLED = "server:app"
SLOW = "tests.apps:slow"


@contextmanager
def slow_server(folder: Path, batch_s: float, **settings: object) -> Iterator[Process]:
    # Else what comes next may still join the first batch, and idle clients hold up the stop.
    at_once = {"batch_wait_ms": 0, "last_call_s": 0.05}
    with server(SLOW, folder, batch_s=batch_s, **(at_once | settings)) as running:
        running.wait_until_ready()
        yield running


@contextmanager
def held_server(folder: Path) -> Iterator[tuple[Process, Path]]:
    """Yield a server that ends no batch before a file is there, and the file."""
    opened = folder / "open"
    with slow_server(folder, batch_s=0, open=opened) as running:
        yield running, opened


def begin_stop(running: Process, unanswered: int) -> None:
    """Send SIGTERM; return when the server has begun to stop."""
    running.process.send_signal(signal.SIGTERM)
    while f"stopping: {unanswered} requests" not in running.log:
        time.sleep(0.01)


def ran(folder: Path) -> list[list[str]]:
    """Return the batches that the model ran."""
    return [json.loads(line) for line in (folder / "ran").read_text().splitlines()]


def send(running: Server, text: str) -> socket.socket:
    """Send a request and return its connection, the answer unread."""
    connection = running.connect()
    head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    connection.sendall((head + text).encode())
    return connection


def answer_on(connection: socket.socket) -> tuple[int, Any]:
    """Read one answer; return its status and the JSON of its body."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def flood(running: Server, pool: ThreadPoolExecutor, texts: list[str]) -> list[Future[Any]]:
    return [pool.submit(running.post, text) for text in texts]


def test_bundled_model_answers_a_curl_as_the_untouched_pipeline_would(tmp_path: Path) -> None:
    with server(BUNDLED, tmp_path) as running:
        assert running.get("/livez").status_code == 200  # the port is open before the model is
        assert running.get("/readyz").status_code == 503
        running.wait_until_ready()
        curl = ["curl", "-s", "-X", "POST", "-d", "Paris is the [MASK] of France.", running.url]
        answer = json.loads(subprocess.check_output(curl))
        fill_mask = pipeline("fill-mask", str(ROOT / "models/tiny-fill-mask"), dtype="float32")
        expected: Any = fill_mask("Paris is the [MASK] of France.")
        assert [row["sequence"] for row in answer] == [row["sequence"] for row in expected]
        assert running.stop() == 0
        assert "Traceback" not in running.log


def test_interrupt_is_a_clean_stop_too(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0) as running:
        assert running.stop(signal.SIGINT) == 0


def test_terminate_finishes_what_was_admitted(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(32)]
    with held_server(tmp_path) as (running, opened):
        waiting = [send(running, "first")]
        running.wait_until((0, 1))
        waiting += [send(running, text) for text in texts]
        running.wait_until((32, 33))
        begin_stop(running, 33)
        opened.touch()
        assert running.process.wait(10) == 0
        answers = [answer_on(connection) for connection in waiting]
    assert answers == [(200, text.upper()) for text in ["first", *texts]]


def test_terminate_refuses_newcomers_on_open_connections(tmp_path: Path) -> None:
    with held_server(tmp_path) as (running, opened):
        admitted = send(running, "a")
        running.wait_until((0, 1))
        late = running.connect()
        late.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
        running.get("/livez")  # the head of `late` has been read by now
        begin_stop(running, 1)
        late.sendall(b"b")
        assert answer_on(late)[0] == 503
        opened.touch()
        answer = HTTPResponse(admitted)
        answer.begin()
        assert answer.getheader("connection") == "close"
        assert answer.read() == b'"A"'
        assert running.process.wait(10) == 0


def test_terminate_answers_once_more_on_a_connection_that_was_idle(tmp_path: Path) -> None:
    """A proxy may send a request the moment before it hears that the connection is closed."""
    with slow_server(tmp_path, batch_s=0, last_call_s=5) as running:
        idle = send(running, "a")
        assert answer_on(idle) == (200, "A")
        running.process.send_signal(signal.SIGTERM)
        while "Waiting for connections to close" not in running.log:
            time.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            running.connect()
        idle.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nb")
        assert answer_on(idle)[0] == 503
        assert idle.recv(1) == b""
        running.client.close()
        assert running.process.wait(10) == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_port_closes_behind_whom_the_kernel_has_let_in(loop: Literal["asyncio", "uvloop"]) -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, port=0, loop=loop, lifespan="off", log_level="error")
    server = uvicorn.Server(config)

    async def answers() -> list[str]:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        waiting = [socket.create_connection(address, timeout=5) for _ in range(3)]
        for connection in waiting:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        late = close_port(server)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        found = [await asyncio.to_thread(connection.recv, 12) for connection in waiting]
        for connection in waiting:
            connection.close()
        server.should_exit = True
        await asyncio.gather(serving, *late)
        return [each.decode() for each in found]

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        assert runner.run(answers()) == ["HTTP/1.1 204"] * 3


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=30) as running:
        waiting = send(running, "a")
        running.wait_until((0, 1))
        begin_stop(running, 1)
        assert running.stop() == 128 + signal.SIGTERM
        assert waiting.recv(4096) == b""


def test_signal_to_the_whole_group_drains_workers_too(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches parent and children, and the parent passes its own on."""
    opened = tmp_path / "open"
    with server(SLOW, tmp_path, "--workers", "1", batch_s=0, open=opened) as running:
        running.wait_until_ready()
        waiting = send(running, "a")
        running.wait_until((0, 1))
        os.killpg(running.process.pid, signal.SIGINT)
        while "stopping: 1 requests" not in running.log:
            time.sleep(0.01)
        opened.touch()
        assert answer_on(waiting) == (200, "A")
        assert running.process.wait(10) == 0


def test_drain_timeout_refuses_the_rest_and_ends(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=30, drain_timeout_s=0.2) as running:
        waiting = send(running, "a")
        running.wait_until((0, 1))
        assert running.stop() == 1
        assert answer_on(waiting)[0] == 500
        assert "drain timed out after 0.2 s: 1 requests cut off" in running.log


def test_unfinished_body_does_not_hold_the_stop_up(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0, drain_timeout_s=0.2) as running:
        unfinished = running.connect()
        unfinished.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        running.get("/livez")
        assert running.stop() == 0


def test_batch_that_nobody_waits_for_does_not_hold_the_stop_up(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=30) as running:
        gone = send(running, "a")
        while not (tmp_path / "ran").exists():
            time.sleep(0.01)
        gone.close()
        running.wait_until((0, 0))
        assert running.stop() == 0


def test_stop_while_loading(tmp_path: Path) -> None:
    with server("tests.apps:stuck_loading", tmp_path) as running:
        assert running.get("/readyz").status_code == 503
        assert running.get("/livez").status_code == 200
        assert running.stop() == 0


def test_dead_worker_answers_its_waiters_and_ends_the_process(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0.1, max_batch_size=1) as running:
        waiting = [send(running, text) for text in ("first", "die", "c", "d")]
        assert running.process.wait(10) == 1
        # No proxy gives another server what this one died of.
        assert [answer_on(connection)[0] for connection in waiting] == [200, 500, 503, 503]
        assert "RuntimeError: the model ended its thread" in running.log


def ends_with(folder: Path, **settings: object) -> str:
    """Start the server, expect it to end by itself with an error, and return its output."""
    run = subprocess.run(
        command(BUNDLED, free_port()),
        cwd=ROOT,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    return run.stderr


def test_call_that_hangs_ends_the_process(tmp_path: Path) -> None:
    with slow_server(tmp_path, 0, watchdog_s=1.5, max_batch_size=1) as running:
        with ThreadPoolExecutor(2) as pool:
            hanging = pool.submit(running.post, "hang")
            running.wait_until((0, 1))
            waiting = pool.submit(running.post, "waits")
            running.wait_until((1, 2))
            assert running.get("/livez").status_code == 200
            assert (hanging.result().status_code, waiting.result().status_code) == (500, 503)
        assert running.process.wait(10) == 1
        assert "the model makes no progress" in running.log
        assert "Traceback" not in running.log


def test_model_that_cannot_be_loaded_ends_the_process_with_one_line(tmp_path: Path) -> None:
    output = ends_with(tmp_path, model_id=tmp_path)
    errors = [line for line in output.splitlines() if "CRITICAL" in line]
    assert len(errors) == 1
    assert f"worker: cannot load model '{tmp_path}'" in errors[0]
    assert "Traceback" not in output


def test_bad_setting_ends_the_process_with_one_line(tmp_path: Path) -> None:
    output = ends_with(tmp_path, max_batch_size="lots")
    assert output.count("\n") == 1
    assert output.startswith("onequeue: max_batch_size='lots': ")


def test_idle_server_costs_no_cpu(tmp_path: Path) -> None:
    def cpu_ticks() -> int:
        stat = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[11]) + int(stat[12])

    with slow_server(tmp_path, batch_s=0) as running:
        before = cpu_ticks()
        time.sleep(2)
        assert cpu_ticks() - before <= 10  # of 200: uvicorn's own tick, and no polling of ours


def test_loop_stays_free_and_admits_while_a_batch_runs(tmp_path: Path) -> None:
    with held_server(tmp_path) as (running, opened):
        waiting = [send(running, "first")]
        running.wait_until((0, 1))
        waiting += [send(running, f"text {number}") for number in range(10)]
        running.wait_until((10, 11))
        assert all(running.get("/livez").status_code == 200 for _ in range(20))
        assert running.gauges() == (10, 11)  # all of that within the first batch
        opened.touch()
        assert all(answer_on(connection)[0] == 200 for connection in waiting)
    assert [len(batch) for batch in ran(tmp_path)] == [1, 10]


def test_flood_is_shed_at_once_and_every_other_answer_is_right(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(100)]
    with (
        slow_server(tmp_path, batch_s=0.05, max_batch_size=4, max_queue_size=16) as running,
        ThreadPoolExecutor(50) as pool,
    ):
        answers = [answer.result() for answer in flood(running, pool, texts)]
        assert {answer.status_code for answer in answers} == {200, 503}
        for text, answer in zip(texts, answers, strict=True):
            if answer.status_code == 200:
                assert answer.json() == text.upper()
            else:
                assert answer.json()["error_type"] == "overloaded"
                assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert running.gauges() == (0, 0)
        assert sum(map(len, ran(tmp_path))) == [a.status_code for a in answers].count(200)


def test_hang_up_while_queued_costs_no_compute(tmp_path: Path) -> None:
    with held_server(tmp_path) as (running, opened):
        first = send(running, "first")
        running.wait_until((0, 1))
        gone = [send(running, f"gone {number}") for number in range(5)]
        mate = send(running, "mate")
        running.wait_until((6, 7))
        for connection in gone:
            connection.close()
        running.wait_until((1, 2))
        opened.touch()
        assert answer_on(first) == (200, "FIRST")
        assert answer_on(mate) == (200, "MATE")
        assert running.gauges() == (0, 0)
    assert ran(tmp_path) == [["first"], ["mate"]]


def test_oversized_body_is_refused_while_it_is_still_being_sent(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0, max_body_bytes=1000) as running:
        announced = running.connect()
        announced.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
        assert answer_on(announced)[0] == 413
        chunked = running.connect()
        chunked.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunked.sendall(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert answer_on(chunked)[0] == 413


def test_answer_to_an_oversized_body_survives_the_close_of_the_connection(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0, max_body_bytes=1000) as running:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5000000\r\n\r\n"
        for _ in range(5):
            closing = running.connect()
            closing.sendall(head + b"x" * 5_000_000)
            assert answer_on(closing)[0] == 413


def test_body_that_never_ends_meets_the_deadline(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0, request_timeout_s=0.2) as running:
        trickle = running.connect()
        trickle.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
        assert answer_on(trickle)[0] == 504


@pytest.mark.parametrize(
    "head", [b"\x00\xff\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -5\r\nhost: x\r\n\r\n"]
)
def test_bytes_that_are_not_http_get_400_and_harm_nobody(tmp_path: Path, head: bytes) -> None:
    with slow_server(tmp_path, batch_s=0) as running:
        hostile = running.connect()
        hostile.sendall(head)
        assert hostile.recv(4096).startswith(b"HTTP/1.1 400")
        assert running.post("a").json() == "A"


def test_bad_host_header_harms_nobody(tmp_path: Path) -> None:
    with slow_server(tmp_path, batch_s=0) as running:
        answer = httpx.get(running.url + "/nowhere", headers={"host": "["})
        assert answer.status_code == 404
