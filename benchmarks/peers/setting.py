"""How a peer is run, as its environment tells it, and the pipeline that all of them serve."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers.pipelines.base import Pipeline


@dataclass(frozen=True)
class Setting:
    """What can be chosen about a peer.

    Attributes:
        workers: Processes that run the model.
        threads: Intra-op threads of torch in each; 0: as torch chooses.
        batch: Largest batch.
        wait_ms: How long a batch waits for company; 0 where a peer does not have it.
        variant: Another choice that a peer offers; its file says which.
    """

    workers: int = 1
    threads: int = 0
    batch: int = 1
    wait_ms: int = 0
    variant: int = 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say so."""
        said = {name.upper(): str(value) for name, value in asdict(self).items()}
        return said | {"WEB_CONCURRENCY": str(self.workers)}  # what uvicorn calls workers

    def __str__(self) -> str:
        """Name the workers, their threads and the batch, as tables do."""
        threads = self.threads or "default"
        variant = f", variant {self.variant}" if self.variant else ""
        return f"{self.workers} x {threads} threads, batch {self.batch}{variant}"


def setting() -> Setting:
    """Read what `Setting.variables` wrote."""
    return Setting(**{name: int(os.environ[name.upper()]) for name in asdict(Setting())})


def port() -> int:
    """Return where to listen."""
    return int(os.environ["PORT"])


def load_pipeline() -> Pipeline:
    """Load the pipeline, in the process that is to run it."""
    transformers.logging.set_verbosity_error()
    if threads := setting().threads:
        torch.set_num_threads(threads)
    task: Any = os.environ.get("TASK", "fill-mask")
    pipeline: Pipeline = transformers.pipeline(task, model=os.environ["MODEL"], dtype=torch.float32)
    return pipeline


def run_batch(pipeline: Pipeline, texts: list[str]) -> list[Any]:
    """Return one answer per text; the pipeline takes a list of one for a single text."""
    answers: list[Any] = pipeline(texts, batch_size=len(texts))
    return [answers] if len(texts) == 1 else answers
