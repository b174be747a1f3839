"""What metrics and a JSON log line per request cost, in requests per second.

    python -m benchmarks.observing

Tiny shape, 32 clients, in turns with a server that counts nothing and logs errors alone; several
pairs of servers. The last line is JSON: the ratio of the rates, median of all rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette

from benchmarks.contestants import Contestant, ours, running
from benchmarks.load import closed_loop
from benchmarks.models import model_folder
from config import load_settings
from metrics import Metrics
from server import create_app
from telemetry import configure_logging

CLIENTS = 32
ROUND_S = 3.0
PAIRS = 5  # a server measures at its start what is fastest, and two find different things
ROUNDS = 4


def blind() -> Starlette:
    """Return the server without metrics."""

    def nothing(*_arguments: Any) -> None:
        """Count nothing."""

    Metrics.count_request = Metrics.count_call = nothing  # type: ignore[method-assign, assignment]
    settings = load_settings()
    configure_logging(settings)
    return create_app(settings)


def main() -> None:
    """Run both servers and measure them in turns."""
    model = model_folder("tiny")
    seeing = replace(ours(model, log_level="info", log_format="json"), name="seeing")
    command = tuple("benchmarks.observing:blind" if "server:" in w else w for w in seeing.command)
    unseen = replace(ours(model), name="unseen", command=(*command, "--factory"))

    def rate(contestant: Contestant, port: int) -> float:
        run = asyncio.run(closed_loop(port, contestant.requests(), CLIENTS, ROUND_S))
        return run.rate

    rounds = []
    for _ in range(PAIRS):
        with running(seeing) as one, running(unseen) as other:
            for turn in range(ROUNDS + 1):
                pair = [(seeing, one), (unseen, other)][:: -1 if turn % 2 else 1]
                found = {contestant.name: rate(contestant, each.port) for contestant, each in pair}
                if turn:
                    rounds.append((found["seeing"], found["unseen"]))
                    sys.stdout.write("{:.1f} and {:.1f} req/s\n".format(*rounds[-1]))
                    sys.stdout.flush()
    ratios = [mine / bare for mine, bare in rounds]
    spread = statistics.quantiles(ratios, n=4)
    sys.stdout.write(f"quartiles {spread[0]:.3f} and {spread[2]:.3f}\n")
    sys.stdout.write(json.dumps({"ratio": round(statistics.median(ratios), 3)}) + "\n")


if __name__ == "__main__":
    main()
