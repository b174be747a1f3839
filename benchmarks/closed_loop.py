"""Throughput and latency of the bundled model under a closed loop of clients.

    python -m benchmarks.closed_loop --clients 1 32 --seconds 10

Each client keeps one connection and sends its next request when the last was answered. Settings of
the server come from the environment: `BATCH_WAIT_MS=0 python -m benchmarks.closed_loop`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from config import Settings
from tests.processes import Server, server

SEED = 11
WORDS = ["the", "a", "dog", "city", "king", "river", "of", "in", "under", "small", "capital", "is"]


def sentences(count: int = 500) -> list[bytes]:
    """Return texts of 5 to 60 words, mostly short, each with one mask."""
    rng = random.Random(SEED)
    texts = []
    for _ in range(count):
        words = rng.choices(WORDS, k=min(60, 5 + int(rng.expovariate(1 / 12))))
        words[rng.randrange(len(words))] = "[MASK]"
        texts.append(" ".join(words).encode())
    return texts


async def client(port: int, texts: list[bytes], end: float) -> list[float]:
    """Send requests until `end`; return their latencies in ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    latencies_ms = []
    while time.perf_counter() < end:
        text = random.choice(texts)
        started = time.perf_counter()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        latencies_ms.append((time.perf_counter() - started) * 1000)
    writer.close()
    return latencies_ms


async def measure(running: Server, clients: int, seconds: float) -> str:
    """Run one closed loop and describe it."""
    texts = sentences()
    started = time.perf_counter()
    end = started + seconds
    per_client = await asyncio.gather(*(client(running.port, texts, end) for _ in range(clients)))
    latencies_ms = [latency for latencies in per_client for latency in latencies]
    cuts = statistics.quantiles(latencies_ms, n=100)
    rate = len(latencies_ms) / (time.perf_counter() - started)
    return f"{clients:4} clients: {rate:7.1f} req/s, p50 {cuts[49]:6.1f} ms, p99 {cuts[98]:6.1f} ms"


def main() -> None:
    """Start the server, warm it up, and measure every number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    given = {
        name: os.environ[name.upper()]
        for name in Settings.model_fields
        if name.upper() in os.environ
    }
    settings = {"log_level": "error"} | given
    with (
        tempfile.TemporaryDirectory() as folder,
        server("server:app", Path(folder), **settings) as running,
    ):
        running.wait_until_ready()
        asyncio.run(measure(running, clients=8, seconds=1))
        for clients in arguments.clients:
            line = asyncio.run(measure(running, clients, arguments.seconds))
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
