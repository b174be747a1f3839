"""What metrics and a JSON log line per request cost, in requests per second.

    python -m benchmarks.observing

Tiny shape, 32 clients, in turns with a server that counts nothing and logs errors alone; several
pairs of servers. The last line is JSON: the ratio of the rates, median of all rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette

from benchmarks.contestants import ours, running
from benchmarks.models import model_folder
from benchmarks.turns import in_turns
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

    ratios = []
    for _ in range(PAIRS):
        with running(seeing) as one, running(unseen) as other:
            servers = (one.port, seeing.requests()), (other.port, unseen.requests())
            rounds = in_turns(servers, CLIENTS, ROUND_S, ROUNDS)
        ratios += [mine.rate / bare.rate for mine, bare in rounds]
    spread = statistics.quantiles(ratios, n=4)
    sys.stdout.write(f"quartiles {spread[0]:.3f} and {spread[2]:.3f}\n")
    sys.stdout.write(json.dumps({"ratio": round(statistics.median(ratios), 3)}) + "\n")


if __name__ == "__main__":
    main()
