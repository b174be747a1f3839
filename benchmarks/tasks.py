"""onequeue against the documentation page's batching server, on other tasks than fill-mask.

    python -m benchmarks.tasks

Base shape, 32 clients, in turns; every answer is compared with the untouched pipeline's to the same
text alone. A line for each task, its last word JSON: the ratio (median of the rounds), both rates,
and how many answers were wrong.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from benchmarks.contestants import Contestant, ours, running
from benchmarks.load import Answer, closed_loop
from benchmarks.models import FOLDER, SEED, model_folder, sentences
from benchmarks.peers.setting import Setting
from benchmarks.peers.table import DOCS_BATCHING

CLIENTS = 32
WARM_UP_S, ROUND_S = 2.0, 8.0
ROUNDS = 3
TOLERANCE = 1e-5
SETTINGS = (Setting(batch=32, wait_ms=1), Setting(2, 1, 2, 1))  # natural, and found best
TASKS = {
    "text-classification": AutoModelForSequenceClassification,
    "feature-extraction": AutoModel,
}


@dataclass(frozen=True)
class Server:
    """One of the servers, and how many of its answers were wrong."""

    contestant: Contestant
    port: int
    checks: bool = True

    def rate(self, seconds: float, expected: Sequence[Any]) -> tuple[float, int]:
        """Return requests per second, and wrong answers."""
        run = asyncio.run(closed_loop(self.port, self.contestant.requests(), CLIENTS, seconds))
        wrong = sum(not _right(answer, expected) for answer in run.answers) if self.checks else 0
        return run.rate, wrong


def folder_for(task: str) -> Path:
    """Return the folder of a random model of base shape for `task`, made on the first call."""
    folder = FOLDER / f"base-{task}"
    if not (folder / "config.json").exists():
        torch.manual_seed(SEED)
        config = AutoConfig.from_pretrained(model_folder("base"), num_labels=3)
        TASKS[task].from_config(config).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(model_folder("base")).save_pretrained(folder)
    return folder


def _token_vectors(text: str) -> bytes:
    """Ask for what the pipeline returns, not for an embedding."""
    return json.dumps({"inputs": text, "parameters": {"pooling": "none"}}).encode()


def _contestants(task: str) -> list[Contestant]:
    mine = ours(folder_for(task))
    if task == "feature-extraction":
        mine = replace(mine, content_type="application/json", body=_token_vectors)
    peers = []
    for setting in SETTINGS:
        peer = DOCS_BATCHING.serving("base", setting)
        changed = {"MODEL": str(folder_for(task)), "TASK": task}
        peers.append(replace(peer, variables={**peer.variables, **changed}))
    return [mine, *peers]


def _numbers(value: Any) -> list[Any]:
    """Return the leaves of a JSON value in order."""
    if isinstance(value, dict):
        value = [item for pair in sorted(value.items()) for item in pair]
    return (
        [leaf for each in value for leaf in _numbers(each)] if isinstance(value, list) else [value]
    )


def _right(answer: Answer, expected: Sequence[Any]) -> bool:
    if answer.status != 200:
        return False
    got, right = _numbers(json.loads(answer.body)), expected[answer.text]
    return len(got) == len(right) and all(
        math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
        if isinstance(other, float)
        else one == other
        for one, other in zip(got, right, strict=True)
    )


def compare(task: str) -> dict[str, Any]:
    """Measure the servers of `task` in turns."""
    pipeline: Any = transformers.pipeline(task, model=str(folder_for(task)), dtype=torch.float32)  # type: ignore[call-overload, unused-ignore]
    expected = [_numbers(pipeline(text)) for text in sentences()]
    rates: list[list[float]] = []
    wrong = 0
    contestants = _contestants(task)
    for _ in range(ROUNDS):
        rates.append([])
        for contestant in contestants:
            with running(contestant) as started:
                server = Server(contestant, started.port, checks=contestant is contestants[0])
                server.rate(WARM_UP_S, expected)
                rate, faults = server.rate(ROUND_S, expected)
            rates[-1].append(rate)
            wrong += faults
    mine, natural, best = (statistics.median(column) for column in zip(*rates, strict=True))
    return {
        "ratio": round(statistics.median(row[0] / max(row[1:]) for row in rates), 2),
        "req_s": round(mine, 1),
        "peer_req_s": round(natural, 1),
        "peer_best_req_s": round(best, 1),
        "wrong": wrong,
    }


def main() -> None:
    """Compare task by task."""
    transformers.logging.set_verbosity_error()
    results = {}
    for task in TASKS:
        results[task] = compare(task)
        sys.stdout.write(f"{task} {json.dumps(results[task])}\n")
        sys.stdout.flush()
    sys.exit(1 if any(result["wrong"] for result in results.values()) else 0)


if __name__ == "__main__":
    main()
