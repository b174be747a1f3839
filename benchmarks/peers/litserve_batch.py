"""LitServe with its batching. Variant 1: the queue between processes that it calls fast."""

from __future__ import annotations

from typing import Any

import litserve

from benchmarks.peers.setting import load_pipeline, port, run_batch, setting


class FillMask(litserve.LitAPI):
    """The pipeline; `predict` gets one text, or a list where batches are allowed."""

    def setup(self, device: str) -> None:
        """Load the pipeline in the worker."""
        self.pipeline = load_pipeline()

    def decode_request(self, request: dict[str, str]) -> str:
        """Take the text out of the body."""
        return request["text"]

    def predict(self, x: Any) -> Any:
        """Run the pipeline."""
        return self.pipeline(x) if isinstance(x, str) else run_batch(self.pipeline, x)

    def encode_response(self, output: Any) -> Any:
        """Answer with the pipeline's own JSON."""
        return output


if __name__ == "__main__":
    chosen = setting()
    api = FillMask(max_batch_size=chosen.batch, batch_timeout=chosen.wait_ms / 1000)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        workers_per_device=chosen.workers,
        timeout=60,
        fast_queue=bool(chosen.variant),
    )
    server.run(host="127.0.0.1", port=port(), log_level="warning", generate_client_file=False)
