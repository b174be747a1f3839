"""nginx before two servers with a core each, against one server with both cores.

    python -m benchmarks.nginx

Tiny shape, 32 clients, in turns. The last line is JSON: the ratio of the rates, rates and latencies
(medians of the rounds) and how many answers were wrong.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.answers import faults, references
from benchmarks.contestants import Contestant, ours, running
from benchmarks.models import model_folder
from benchmarks.turns import in_turns, tell
from tests.nginx import nginx

CLIENTS = 32
ROUND_S = 3.0
ROUNDS = 9


def pinned(core: int) -> Contestant:
    """Return a server with one thread on one core."""
    server = ours(model_folder("tiny"), num_threads=1)
    command = ("taskset", "--cpu-list", str(core), *server.command)
    return replace(server, name=f"core {core}", command=command)


def main() -> None:
    """Run all servers and measure in turns; those that wait take no processor."""
    expected = references(model_folder("tiny"))
    first, second = sorted(os.sched_getaffinity(0))[:2]
    both = ours(model_folder("tiny"), num_threads=2)
    requests = both.requests()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(both) as one,
        running(pinned(first)) as left,
        running(pinned(second)) as right,
        nginx(Path(folder), (left.port, right.port)) as front,
    ):
        servers = ((front.port, requests), (one.port, requests))
        rounds = in_turns(servers, CLIENTS, ROUND_S, ROUNDS)
    answers = [answer for pair in rounds for run in pair for answer in run.answers]
    tell(rounds, "one_server", faults(answers, expected))


if __name__ == "__main__":
    main()
