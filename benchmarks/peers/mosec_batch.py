"""mosec with its dynamic batching."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker

from benchmarks.peers.setting import load_pipeline, run_batch, setting


class FillMask(Worker):
    """The pipeline; `forward` gets one body, or a list where batches are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = load_pipeline()

    def forward(self, data: Any) -> Any:
        """Run the pipeline."""
        if isinstance(data, dict):
            return self.pipeline(data["text"])
        return run_batch(self.pipeline, [each["text"] for each in data])


if __name__ == "__main__":
    chosen = setting()
    server = Server()
    server.append_worker(
        FillMask,
        num=chosen.workers,
        max_batch_size=chosen.batch,
        max_wait_time=chosen.wait_ms,
        timeout=60,
    )
    server.run()
