"""BentoML with its adaptive batching, which chooses how long a batch waits."""

from __future__ import annotations

from typing import Any

import bentoml

from benchmarks.peers.setting import load_pipeline, run_batch, setting

chosen = setting()


@bentoml.service(
    workers=chosen.workers, traffic={"timeout": 60}, logging={"access": {"enabled": False}}
)
class FillMask:
    """The pipeline."""

    def __init__(self) -> None:
        self.pipeline = load_pipeline()

    @bentoml.api(
        batchable=chosen.batch > 1, max_batch_size=max(2, chosen.batch), max_latency_ms=60_000
    )
    def predict(self, texts: list[str]) -> list[Any]:
        """Run the pipeline for the texts of several requests."""
        return run_batch(self.pipeline, texts)
