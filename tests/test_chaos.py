"""2,000 requests from 64 clients, good, bad, hurried and hanging up, against the real server.

Afterwards every answer was right, the counts add up, the gauges are at zero, the server is alive.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import pipeline

from tests.models import assert_same
from tests.processes import ROOT, Server, server

REQUESTS = 2000
CLIENTS = 64
WORDS = ["the", "a", "dog", "cat", "king", "river", "of", "in", "under", "small", "to", "is"]
JSON = "application/json"

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


async def storm(client: Client) -> None:
    """Let CLIENTS clients work through REQUESTS requests of all kinds."""
    rng = random.Random(7)
    kinds = [client.good, client.bad, client.hang_up, client.hurried]
    plan = iter(rng.choices(kinds, weights=[75, 10, 10, 5], k=REQUESTS))

    async def work() -> None:
        for kind in plan:
            await kind(rng)

    await asyncio.gather(*(work() for _ in range(CLIENTS)))


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


async def storm_and_terminate(client: Client, running: Server, texts: list[str]) -> dict[str, int]:
    answered: dict[str, int] = {}
    tasks = [asyncio.create_task(ask_until_closed(client, texts, answered)) for _ in range(32)]
    await asyncio.sleep(1.5)
    running.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    return answered


def test_terminate_under_load_breaks_no_admitted_request(tmp_path: Path) -> None:
    fill_mask = pipeline("fill-mask", str(ROOT / "models/tiny-fill-mask"), dtype="float32")
    expected = {text: fill_mask(text) for text in sentences(random.Random(5), 20)}
    with server("server:app", tmp_path) as running:
        running.wait_until_ready()
        client = Client(running, expected)
        answered = asyncio.run(storm_and_terminate(client, running, list(expected)))
        assert running.process.wait(30) == 0
        logged = dict(re.findall(r"request (\S+): POST '/' (\d+) in", running.log))
    assert {name: str(status) for name, status in answered.items()} == logged
    sys.stdout.write(f"32 clients, SIGTERM: {Counter(answered.values())}, none broken\n")


def test_chaos_leaves_every_answer_right_and_the_server_alive(tmp_path: Path) -> None:
    fill_mask = pipeline("fill-mask", str(ROOT / "models/tiny-fill-mask"), dtype="float32")
    texts = sentences(random.Random(3), 150)
    expected = {text: fill_mask(text) for text in texts}
    with server("server:app", tmp_path, log_level="warning") as running:
        running.wait_until_ready()
        client = Client(running, expected)
        asyncio.run(asyncio.wait_for(storm(client), 100))
        assert client.counts.total() == REQUESTS
        assert min(client.counts.values()) > 20
        sys.stdout.write(f"{REQUESTS} requests, {CLIENTS} clients: {dict(client.counts)}\n")
        running.wait_until((0, 0))
        status, answer = asyncio.run(client.ask(texts[0].encode()))
        assert status == 200
        assert_same(answer, expected[texts[0]])
        assert "Traceback" not in running.log
        assert running.stop() == 0
