"""How fast `/livez` answers while the model computes on all cores, 2 s per batch.

    python -m benchmarks.livez

Thirty-two clients keep the queue filled; one asks `/livez` every 20 ms for 20 s.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
from starlette.applications import Starlette

from config import Settings, load_settings
from server import create_app
from tests.fakes import FakeModel
from tests.processes import Server, server

BATCH_S = 2.0
MEASURE_S = 20.0
CLIENTS = 32


def busy() -> Starlette:
    """Return an application whose model multiplies matrices for BATCH_S per batch."""
    settings = load_settings()

    def load(settings: Settings) -> FakeModel:
        import torch

        torch.set_num_threads(settings.num_threads)
        square = torch.rand(1024, 1024)

        def compute(_texts: list[str]) -> None:
            end = time.monotonic() + BATCH_S
            while time.monotonic() < end:
                square @ square

        return FakeModel(compute)

    return create_app(settings, load)


async def measure(running: Server) -> tuple[list[float], int, int]:
    """Return the latencies of /livez (ms), the answered requests and the largest queue depth."""
    latencies_ms: list[float] = []
    answered = 0
    end = time.monotonic() + MEASURE_S

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal answered
        while time.monotonic() < end:
            answer = await client.post(running.url, content=b"text")
            answered += answer.status_code == 200

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(ask(client))
        depth = 0
        while time.monotonic() < end:
            started = time.perf_counter()
            (await client.get(running.url + "/livez")).raise_for_status()
            latencies_ms.append((time.perf_counter() - started) * 1000)
            depth = max(depth, (await client.get(running.url + "/info")).json()["queue_depth"])
            await asyncio.sleep(0.02)
    return latencies_ms, answered, depth


def main() -> None:
    """Run the server, measure, print."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server("benchmarks.livez:busy", Path(folder), max_batch_size=8) as running,
    ):
        running.wait_until_ready()
        latencies_ms, answered, depth = asyncio.run(measure(running))
    cuts = statistics.quantiles(latencies_ms, n=100)
    sys.stdout.write(
        f"/livez while batches take {BATCH_S:g} s: {len(latencies_ms)} asked, "
        f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, max {max(latencies_ms):.1f} ms; "
        f"{answered} requests answered, queue depth up to {depth}\n"
    )


if __name__ == "__main__":
    main()
