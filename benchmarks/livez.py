"""How fast probes and metrics answer while the model computes on all cores.

    python -m benchmarks.livez

Thirty-two clients keep the queue filled for 20 s, first of a model that multiplies matrices for 2 s
per batch, then of a BERT-base; another client asks `/livez`, `/readyz` and `/metrics` all the time.
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

from benchmarks.models import model_folder
from config import Settings, load_settings
from server import create_app
from tests.fakes import FakeModel
from tests.processes import server
from tests.servers import Server

BATCH_S = 2.0
MEASURE_S = 20.0
CLIENTS = 32
PROBES = ("/livez", "/readyz", "/metrics")


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


async def measure(running: Server) -> dict[str, list[float]]:
    """Return the latencies of each of PROBES, in ms, and the latencies of the requests."""
    found: dict[str, list[float]] = {path: [] for path in (*PROBES, "requests")}
    end = time.monotonic() + MEASURE_S

    async def ask(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            started = time.perf_counter()
            (await client.post(running.url, content=b"a [MASK] text")).raise_for_status()
            found["requests"].append((time.perf_counter() - started) * 1000)

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(ask(client))
        while time.monotonic() < end:
            for path in PROBES:
                started = time.perf_counter()
                (await client.get(running.url + path)).raise_for_status()
                found[path].append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(0.02)
    return found


def main() -> None:
    """Run the servers, measure, print."""
    base = {"model_id": model_folder("base"), "log_level": "error"}
    for name, target, settings in (
        (f"batches of {BATCH_S:g} s", "benchmarks.livez:busy", {"max_batch_size": 8}),
        ("BERT-base", "server:app", base),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            server(target, Path(folder), **settings) as running,
        ):
            running.wait_until_ready()
            found = asyncio.run(measure(running))
        for path, latencies_ms in found.items():
            cuts = statistics.quantiles(latencies_ms, n=100)
            sys.stdout.write(
                f"{name}: {path}: {len(latencies_ms)} asked, p50 {cuts[49]:.1f} ms, "
                f"p99 {cuts[98]:.1f} ms, max {max(latencies_ms):.1f} ms\n"
            )


if __name__ == "__main__":
    main()
