"""Ray Serve with its dynamic batching. Variant 1: the batch runs in a thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peers.setting import load_pipeline, port, run_batch, setting

chosen = setting()


class FillMask:
    """The pipeline."""

    def __init__(self) -> None:
        self.pipeline = load_pipeline()

    @serve.batch(max_batch_size=chosen.batch, batch_wait_timeout_s=chosen.wait_ms / 1000)
    async def predict(self, texts: list[str]) -> list[Any]:
        """Run the pipeline for the texts of several requests."""
        if chosen.variant:
            return await asyncio.to_thread(run_batch, self.pipeline, texts)
        return run_batch(self.pipeline, texts)

    async def __call__(self, request: Request) -> Any:
        """Answer one request."""
        return await self.predict((await request.json())["text"])


if __name__ == "__main__":
    stopped = threading.Event()
    ray.init(include_dashboard=False, object_store_memory=100_000_000, num_cpus=4)
    serve.start(http_options={"host": "127.0.0.1", "port": port()})
    deployment = serve.deployment(
        num_replicas=chosen.workers,
        max_ongoing_requests=128,
        logging_config={"enable_access_log": False},
    )
    serve.run(deployment(FillMask).bind())
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    stopped.wait()
    serve.shutdown()
    ray.shutdown()
