"""Thousands of requests from 64 clients, good, bad, hurried and hanging up, at the real server.

Meanwhile its model fails, stalls and runs out of memory at random, and is loaded anew. Afterwards
every answer was right, the counts add up and are those of /metrics, the gauges are at zero, the
server is alive, and, of enough requests (CHAOS_REQUESTS), its memory has not grown.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import pipeline

from tests.models import assert_same
from tests.processes import ROOT, Process, server
from tests.servers import Server
from tests.test_metrics import scraped

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "2000"))
TERMINATIONS = int(os.environ.get("TERMINATIONS", "1"))
WARM = 20_000  # requests after which memory may grow no more
GROWTH = 1.03
RELOAD_EVERY_S = 2 if REQUESTS < WARM else 30
TIMEOUT_S = 60 + REQUESTS / 20
CLIENTS = 64
WORDS = ["the", "a", "dog", "cat", "king", "river", "of", "in", "under", "small", "to", "is"]
JSON = "application/json"
MEMORY = "process_resident_memory_bytes"

BAD: list[tuple[bytes, str, int]] = [
    (b"no mask here", "", 422),
    (b"", "", 400),
    (b" \t\n", "text/plain", 400),
    (b"\xff\xfe [MASK]", "", 400),
    (b"nul \0 [MASK]", "", 422),
    (b'{"inputs": "\\ud800 [MASK]"}', JSON, 400),
    (b'{"inputs": 5}', JSON, 422),
    (b'{"inputs": "[MASK]", "parameters": {"top_q": 5}}', JSON, 422),
    (b'{"inputs": "[MASK]", "parameters": {"top_k": -1}}', JSON, 422),
    (b'{"inputs": "[MASK]", "parameters": {"top_k": 99999999}}', JSON, 422),
    (b"[" * 50_000, JSON, 400),
    (b"word " * 300 + b"[MASK]", "", 422),
    (b"x" * 2_000_001, "", 413),
    (b"[MASK]", "image/png", 415),
]


def sentences(rng: random.Random, count: int) -> list[str]:
    """Return `count` word salads of 1 to 60 words with one to three masks."""
    salads = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(1, 60))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            words.insert(rng.randint(0, len(words)), "[MASK]")
        salads.append(" ".join(words))
    return salads


class Client:
    """Sends single requests to a server and counts what became of them."""

    def __init__(self, running: Server, expected: dict[str, Any]) -> None:
        self.counts: Counter[str] = Counter()
        self.warm_bytes = 0.0
        self._port = running.port
        self._expected = expected

    async def send(
        self, body: bytes, content_type: str = "", headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}"
        head += f"content-type: {content_type}\r\n" if content_type else ""
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        return reader, writer

    async def ask(self, body: bytes, content_type: str = "", headers: str = "") -> tuple[int, Any]:
        """Send a request; return status and JSON."""
        reader, writer = await self.send(body, content_type, headers)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(await reader.read())
        finally:
            writer.close()

    async def good(self, rng: random.Random) -> None:
        text, top_k = rng.choice(list(self._expected)), rng.randint(1, 5)
        body = json.dumps({"inputs": [text], "parameters": {"top_k": top_k}}).encode()
        status, answer = await self.ask(body, JSON)
        assert status == 200, answer
        self.check([text], answer, top_k)
        self.counts["right"] += 1

    async def many(self, rng: random.Random) -> None:
        texts = rng.choices(list(self._expected), k=rng.randint(2, 12))
        status, answer = await self.ask(json.dumps({"inputs": texts}).encode(), JSON)
        assert status == 200, answer
        self.check(texts, answer, 5)
        self.counts["right"] += 1

    async def poisoned(self, rng: random.Random) -> None:
        text = f"poison {rng.choice(list(self._expected))}"
        status, answer = await self.ask(text.encode())
        assert (status, answer["error_type"]) == (424, "backend")
        self.counts["failed"] += 1

    async def bad(self, rng: random.Random) -> None:
        body, content_type, expected = rng.choice(BAD)
        status, answer = await self.ask(body, content_type)
        assert status == expected, (body[:80], status, answer)
        assert set(answer) == {"error", "error_type"}
        self.counts["refused"] += 1

    async def hurried(self, rng: random.Random) -> None:
        text = rng.choice(list(self._expected))
        timeout_s = rng.choice([0.0001, 0.001, 0.02])
        status, answer = await self.ask(
            text.encode(), headers=f"x-request-timeout: {timeout_s}\r\n"
        )
        assert status in (200, 504)
        if status == 200:
            self.check([text], [answer], 5)
        self.counts["right" if status == 200 else "expired"] += 1

    async def hang_up(self, rng: random.Random) -> None:
        text = rng.choice(list(self._expected))
        _, writer = await self.send(text.encode())
        await asyncio.sleep(rng.random() * 0.03)
        writer.transport.abort()
        self.counts["hung up"] += 1

    def check(self, texts: list[str], answers: list[Any], top_k: int) -> None:
        for text, answer in zip(texts, answers, strict=True):
            expected = self._expected[text]
            one_mask = isinstance(expected[0], dict)
            assert_same(answer, expected[:top_k] if one_mask else [m[:top_k] for m in expected])


async def storm(client: Client, running: Server) -> None:
    """Let CLIENTS clients work through REQUESTS requests of all kinds, and load the model anew."""
    rng = random.Random(7)
    kinds = [client.good, client.many, client.poisoned, client.bad, client.hang_up, client.hurried]
    plan = iter(rng.choices(kinds, weights=[70, 4, 1, 10, 10, 5], k=REQUESTS))

    async def work() -> None:
        for kind in plan:
            await kind(rng)
            if client.counts.total() == WARM:
                client.warm_bytes = (await asyncio.to_thread(scraped, running))[MEMORY]

    async def reload() -> None:
        headers = {"authorization": "Bearer root"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            while True:
                answer = await http.post(running.url + "/admin/reload")
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(RELOAD_EVERY_S)

    reloading = asyncio.create_task(reload())
    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    reloading.cancel()
    await asyncio.gather(reloading, return_exceptions=True)


async def ask_until_closed(client: Client, texts: list[str], answered: dict[str, int]) -> None:
    """Send one request after the other until the port is closed; note the status of each by id."""
    for number in itertools.count():
        request_id = f"{id(asyncio.current_task())}-{number}"
        try:
            text = texts[number % len(texts)]
            headers = f"x-request-id: {request_id}\r\n"
            answered[request_id], answer = await client.ask(text.encode(), headers=headers)
        except ConnectionRefusedError:
            return
        except (ConnectionResetError, asyncio.IncompleteReadError, ValueError):
            continue  # nothing or half an answer came: the log must not know of it
        if answered[request_id] == 200:
            client.check([text], [answer], 5)


async def storm_and_terminate(client: Client, running: Process, texts: list[str]) -> dict[str, int]:
    answered: dict[str, int] = {}
    tasks = [asyncio.create_task(ask_until_closed(client, texts, answered)) for _ in range(32)]
    await asyncio.sleep(1.5)
    running.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return answered


@pytest.mark.parametrize("_time", range(TERMINATIONS))
def test_terminate_under_load_breaks_no_admitted_request(_time: int, tmp_path: Path) -> None:
    fill_mask = pipeline("fill-mask", str(ROOT / "models/tiny-fill-mask"), dtype="float32")
    expected = {text: fill_mask(text) for text in sentences(random.Random(5), 20)}
    with server("server:app", tmp_path) as running:
        running.wait_until_ready()
        client = Client(running, expected)
        answered = asyncio.run(storm_and_terminate(client, running, list(expected)))
        assert running.process.wait(30) == 0
        logged = dict(re.findall(r"request (\S+): POST '/' (\d+) in", running.log))
    assert {name: str(status) for name, status in answered.items()} == logged
    assert 200 in answered.values()
    assert set(answered.values()) <= {200, 503}
    sys.stdout.write(f"32 clients, SIGTERM: {Counter(answered.values())}, none broken\n")


def check_metrics(found: Mapping[str, float], counts: Mapping[str, int]) -> None:
    """See that the server has counted what its clients have."""
    ends: Counter[str] = Counter()
    for name, value in found.items():
        if name.startswith("requests_total") and value:
            ends[name.rpartition("outcome=")[2].rstrip("}")] += int(value)
    assert {"invalid": counts["refused"], "expired": counts["expired"]}.items() <= ends.items()
    assert ends["failed"] == counts["failed"]
    assert counts["right"] <= ends["ok"] <= counts["right"] + counts["hung up"]
    assert ends["ok"] + ends["cancelled"] <= counts["right"] + counts["hung up"]
    assert set(ends) == {"ok", "invalid", "failed", "expired", "cancelled"}
    assert (found["queue_size"], found["in_flight"], found["ready"]) == (0, 0, 1)
    for name in ("batch_retries_total", "out_of_memory_total", "reloads_total{outcome=done}"):
        assert found[name] > 0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_chaos_leaves_every_answer_right_and_the_server_alive(tmp_path: Path) -> None:
    fill_mask = pipeline("fill-mask", str(ROOT / "models/tiny-fill-mask"), dtype="float32")
    texts = sentences(random.Random(3), 150)
    expected = {text: fill_mask(text) for text in texts}
    settings = {"log_level": "error", "admin_key": "root"}
    with server("tests.apps:chaotic", tmp_path, **settings) as running:
        running.wait_until_ready()
        client = Client(running, expected)
        asyncio.run(asyncio.wait_for(storm(client, running), TIMEOUT_S))
        assert client.counts.total() == REQUESTS
        assert min(client.counts.values()) > 10
        running.wait_until((0, 0))
        found = scraped(running)
        check_metrics(found, client.counts)
        sys.stdout.write(f"{REQUESTS} requests, {CLIENTS} clients: {dict(client.counts)}\n")
        reloads, retries = found["reloads_total{outcome=done}"], found["batch_retries_total"]
        sys.stdout.write(f"{reloads:.0f} reloads, {retries:.0f} batches halved\n")
        if client.warm_bytes:
            growth = found[MEMORY] / client.warm_bytes
            sys.stdout.write(f"memory after {WARM} and after all: x{growth:.3f}\n")
            assert growth <= GROWTH
        status, answer = asyncio.run(client.ask(texts[0].encode()))
        assert status == 200
        assert_same(answer, expected[texts[0]])
        told = [line for line in running.log.splitlines() if re.match(r"\d{4}-", line)]
        assert len(told) == client.counts["failed"]
        assert all("the model failed" in line for line in told)
        assert running.stop() == 0
