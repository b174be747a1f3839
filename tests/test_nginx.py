"""deploy/nginx.conf in a real nginx before real servers: nothing is lost, nothing runs twice."""

from __future__ import annotations

import json
import re
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from config import Settings
from tests.nginx import Nginx, needs_nginx, nginx
from tests.processes import Process, server
from tests.servers import Server, free_port
from tests.test_metrics import scraped
from tests.threads import serving
from tests.tiny_causal import saved_causal

pytestmark = needs_nginx

CLIENTS = 12


@dataclass
class Fleet:
    """Two servers and the nginx before them."""

    servers: tuple[Process, Process]
    nginx: Nginx

    def post(self, text: str) -> httpx.Response:
        headers = {"x-request-id": text}
        return httpx.post(self.nginx.url, content=text, headers=headers, timeout=30)

    def ran(self) -> Counter[str]:
        """Return how often each text was computed, by both."""
        files = [each.log_file.with_name("ran") for each in self.servers]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return Counter(text for line in lines for text in json.loads(line))


@contextmanager
def fleet(folder: Path, **settings: object) -> Iterator[Fleet]:
    with ExitStack() as stack:
        servers = []
        for name in ("0", "1"):
            (folder / name).mkdir()
            running = server("tests.apps:slow", folder / name, log_level="warning", **settings)
            servers.append(stack.enter_context(running))
        for each in servers:
            each.wait_until_ready()
        first, second = servers
        yield Fleet((first, second), stack.enter_context(nginx(folder, (first.port, second.port))))


@dataclass
class Load:
    """What clients got that ask one request after the other, each with a text of its own."""

    answers: dict[str, httpx.Response] = field(default_factory=dict)

    def wait_for(self, more: int) -> None:
        """Wait until there are some more answers."""
        wanted, deadline = len(self.answers) + more, time.monotonic() + 30
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def statuses(self) -> Counter[int]:
        return Counter(answer.status_code for answer in self.answers.values())


@contextmanager
def load(fleet: Fleet) -> Iterator[Load]:
    """Let CLIENTS ask until the end of the block; look at what they got after it."""
    found, stop = Load(), threading.Event()

    def client(number: int) -> None:
        with httpx.Client(base_url=fleet.nginx.url, timeout=30) as http:
            turn = 0
            while not stop.is_set():
                text = f"text-{number}-{turn}"
                headers = {"x-request-id": text}
                found.answers[text] = http.post("/", content=text, headers=headers)
                turn += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield found
        finally:
            stop.set()
        for each in clients:
            each.result()


def test_reload_and_stop_under_load_lose_nothing_and_run_nothing_twice(tmp_path: Path) -> None:
    settings = {"batch_s": 0.02, "load_s": 0.3, "max_batch_size": 4, "admin_key": "root"}
    with fleet(tmp_path, **settings) as running:
        with load(running) as found:
            found.wait_for(50)
            url = running.servers[0].url + "/admin/reload"
            answer = httpx.post(url, headers={"authorization": "Bearer root"}, timeout=30)
            assert answer.status_code == 200
            found.wait_for(50)
            assert running.servers[1].stop() == 0
            found.wait_for(50)
        assert found.statuses().keys() == {200}
        assert all(answer.json() == text.upper() for text, answer in found.answers.items())
        assert running.ran() == Counter(found.answers.keys())
        tries = running.nginx.tries(found.answers)
        assert {tries[text].ports[0] for text in found.answers} == set(running.nginx.inner)
        elsewhere = [tries[text] for text in found.answers if len(tries[text].ports) > 1]
        assert {each.statuses for each in elsewhere} == {(503, 200)}


def test_killed_server_takes_along_only_what_it_holds(tmp_path: Path) -> None:
    with fleet(tmp_path, batch_s=0.05, max_batch_size=4) as running:
        with load(running) as found:
            found.wait_for(50)
            running.servers[0].process.kill()
            found.wait_for(50)
        lost = {text for text, answer in found.answers.items() if answer.status_code != 200}
        assert 0 < len(lost) <= CLIENTS
        assert found.statuses().keys() == {200, 502}
        told = [found.answers[text] for text in lost]
        assert {answer.json()["error_type"] for answer in told} == {"backend"}
        assert {answer.headers["x-request-id"] for answer in told} == lost
        tries = running.nginx.tries(found.answers)
        assert {tries[text].ports[-1] for text in lost} == {running.nginx.inner[0]}
        ran = running.ran()
        assert set(ran.values()) == {1}
        assert found.answers.keys() - ran.keys() <= lost


def test_poison_kills_one_server_and_not_the_next(tmp_path: Path) -> None:
    with fleet(tmp_path, batch_s=0, open=tmp_path / "open", max_batch_size=1) as running:
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(running.post, text) for text in ("die", "a", "b", "c")]
            deadline = time.monotonic() + 10
            while sum(each.gauges()[1] for each in running.servers) < len(waiting):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (tmp_path / "open").touch()
            answers = [each.result() for each in waiting]
        assert [answer.status_code for answer in answers] == [500, 200, 200, 200]
        assert running.ran() == Counter(["die", "a", "b", "c"])
        assert running.post("d").json() == "D"


def test_full_queue_spills_over_and_when_all_are_full_they_say_so(tmp_path: Path) -> None:
    held = {"open": tmp_path / "open", "max_batch_size": 1, "max_queue_size": 1}
    with fleet(tmp_path, batch_s=0, **held) as running, ThreadPoolExecutor(4) as pool:
        one, other = running.servers
        waiting: list[Future[httpx.Response]] = []
        for ask, counted, gauges in (
            (one.post, one, (0, 1)),
            (one.post, one, (1, 2)),
            (running.post, other, (0, 1)),
            (running.post, other, (1, 2)),
        ):
            waiting.append(pool.submit(ask, f"text-{len(waiting)}"))
            counted.wait_until(gauges)
        refused = running.post("refused")
        (tmp_path / "open").touch()
        assert [each.result().json() for each in waiting] == [f"TEXT-{n}" for n in range(4)]
        assert refused.status_code == 503
        assert refused.json() == {"error": "the queue is full", "error_type": "overloaded"}
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-request-id"] == "refused"
        tries = running.nginx.tries(["text-2", "text-3", "refused"])
        assert tries["refused"].statuses == (503, 503)
        spilt = {tries[text].statuses for text in ("text-2", "text-3")}
        assert (503, 200) in spilt <= {(200,), (503, 200)}


def test_loading_server_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "loading").mkdir()
    with (
        server("tests.apps:stuck_loading", tmp_path / "loading") as loading,
        server("tests.apps:slow", tmp_path, batch_s=0) as ready,
        nginx(tmp_path, (loading.port, ready.port)) as front,
    ):
        ready.wait_until_ready()
        for number in range(6):
            assert httpx.post(front.url, content=f"a{number}").json() == f"A{number}"
        assert httpx.get(front.url + "/readyz").status_code == 200
        assert (503, 200) in {each.statuses for each in front.tries().values()}


class Fake(socketserver.ThreadingTCPServer):
    """A server that keeps what it was sent, and does with each request what a test says."""

    daemon_threads = True

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        super().__init__(("127.0.0.1", 0), Conversation)
        self.behave = behave
        self.received: list[tuple[bytes, bytes]] = []  # head and body

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port


class Conversation(socketserver.StreamRequestHandler):
    """One connection with a `Fake`, for one request."""

    def handle(self) -> None:
        assert isinstance(self.server, Fake)
        head = b"".join(iter(self.rfile.readline, b"\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        body = self.rfile.read(int(length[1]) if length else 0)
        if head:
            self.server.received.append((head, body))
            self.server.behave(self.connection)


def answers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")


def closes(_connection: socket.socket) -> None:
    """Hang up, the request read."""


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def breaks_off(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 O")


def fails(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


@contextmanager
def fake(behave: Callable[[socket.socket], None]) -> Iterator[Fake]:
    with Fake(behave) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield listening
        finally:
            listening.shutdown()


@pytest.mark.parametrize("behave", [closes, resets, breaks_off, fails])
def test_what_was_sent_is_not_sent_again(
    tmp_path: Path, behave: Callable[[socket.socket], None]
) -> None:
    with (
        fake(behave) as bad,
        fake(answers) as good,
        nginx(tmp_path, (bad.port, good.port)) as front,
    ):
        texts = [b"%d" % number for number in range(6)]
        statuses = [httpx.post(front.url, content=text).status_code for text in texts]
        assert sorted(body for each in (bad, good) for _, body in each.received) == texts
        assert statuses.count(500 if behave is fails else 502) == len(bad.received) > 0
        assert statuses.count(200) == len(good.received) > 0


def test_what_cannot_be_reached_is_passed_by(tmp_path: Path) -> None:
    with fake(answers) as good, nginx(tmp_path, (free_port(), good.port)) as front:
        assert {httpx.post(front.url, content=b"a").status_code for _ in range(6)} == {200}
        assert len(good.received) == 6
        assert "Connection refused" in front.errors()


def test_nobody_there_is_a_503_in_the_words_of_the_servers(tmp_path: Path) -> None:
    with nginx(tmp_path, (free_port(), free_port())) as front:
        answer = httpx.post(front.url, content=b"a")
        assert answer.status_code == 503
        assert answer.json()["error_type"] == "unhealthy"
        assert answer.headers["retry-after"] == "1"


def test_headers_pass_and_each_request_has_an_id(tmp_path: Path) -> None:
    passed = {
        "authorization": "bearer key",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-timeout": "2.5",
        "content-type": "text/plain",
    }
    with (
        fake(answers) as one,
        fake(answers) as other,
        nginx(tmp_path, (one.port, other.port)) as front,
    ):
        httpx.post(front.url + "/predict?a=b%20c", headers={**passed, "x-request-id": "mine"})
        httpx.post(front.url, headers=passed)
        sent = [head for each in (one, other) for head, _ in each.received]
        own, made = sorted(sent, key=lambda head: b"/predict" not in head)
    for head in sent:
        assert all(f"{name}: {value}\r\n".encode() in head for name, value in passed.items())
    assert own.startswith(b"post /predict?a=b%20c http/1.1\r\n")
    assert b"x-request-id: mine\r\n" in own
    assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", made)


DOORS = (
    "/metrics",
    "/admin/reload",
    "/%61dmin/reload",
    "//admin/reload",
    "/a/../metrics",
    "/admin/",
)


def test_admin_and_metrics_are_not_there_from_outside(tmp_path: Path) -> None:
    with (
        fake(answers) as one,
        fake(answers) as other,
        nginx(tmp_path, (one.port, other.port)) as front,
    ):
        for path in DOORS:
            with socket.create_connection(("127.0.0.1", front.port)) as connection:
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"
                connection.sendall(f"{head}connection: close\r\n\r\n".encode())
                answer = connection.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 404 "), path
            assert b'"error_type":"validation"' in answer
        assert one.received + other.received == []


def test_body_may_be_as_large_as_the_servers_take_it(tmp_path: Path) -> None:
    largest = Settings.model_fields["max_body_bytes"].default
    with (
        fake(answers) as one,
        fake(answers) as other,
        nginx(tmp_path, (one.port, other.port)) as front,
    ):
        assert httpx.post(front.url, content=b"x" * largest).status_code == 200
        refused = httpx.post(front.url, content=b"x" * (largest + 1))
        assert refused.status_code == 413
        assert refused.json()["error_type"] == "too_large"
        assert [len(body) for each in (one, other) for _, body in each.received] == [largest]


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Nginx]]:
    """A server that generates text behind nginx; the other one is not there."""
    folder = tmp_path_factory.mktemp("causal")
    model = saved_causal(folder / "m", max_position_embeddings=4096)
    with serving(model_id=model) as running, nginx(folder, (running.port, free_port())) as front:
        yield running, front


def completion(max_tokens: int) -> dict[str, Any]:
    return {"prompt": [5, 6, 8], "max_tokens": max_tokens, "temperature": 0, "stream": True}


def words(lines: Iterator[str]) -> list[str]:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(event)["choices"][0]["text"] for event in events]


def test_stream_arrives_as_it_is_made(causal: tuple[Server, Nginx]) -> None:
    running, front = causal
    found = []
    for url in (running.url, front.url):
        with httpx.stream("POST", url + "/v1/completions", json=completion(40)) as answer:
            found.append(words(answer.iter_lines()))
    assert found[0] == found[1]
    assert len(found[1]) > 10
    with httpx.stream("POST", front.url + "/v1/completions", json=completion(3000)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert running.get("/info").json()["generation"]["running"] == 1  # and the end is far
    running.wait_until((0, 0))


def test_hang_up_passes_to_the_server(causal: tuple[Server, Nginx]) -> None:
    running, front = causal
    cancelled = "requests_total{code=200,outcome=cancelled}"
    before = scraped(running).get(cancelled, 0)
    with httpx.stream("POST", front.url + "/v1/completions", json=completion(3000)) as answer:
        next(answer.iter_lines())
    running.wait_until((0, 0))
    assert running.get("/info").json()["generation"]["running"] == 0
    assert scraped(running)[cancelled] == before + 1
