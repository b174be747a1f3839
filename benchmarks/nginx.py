"""nginx before two servers with a core each, against one server with both cores.

    python -m benchmarks.nginx

Tiny shape, 32 clients, in turns. The last line is JSON: the ratio of the rates (median of the
rounds), both rates (medians) and how many answers were wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.answers import faults, references
from benchmarks.contestants import Contestant, ours, running
from benchmarks.load import Run, closed_loop
from benchmarks.models import model_folder
from tests.nginx import nginx

CLIENTS = 32
WARM_UP_S = 3.0
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

        def measure(turn: int, seconds: float) -> tuple[Run, Run]:
            ports = (front.port, one.port)
            order = ports if turn % 2 == 0 else ports[::-1]
            runs = {p: asyncio.run(closed_loop(p, requests, CLIENTS, seconds)) for p in order}
            return runs[front.port], runs[one.port]

        measure(0, WARM_UP_S)
        rounds = [measure(turn, ROUND_S) for turn in range(ROUNDS)]
    wrong = faults([answer for pair in rounds for run in pair for answer in run.answers], expected)
    for pair in rounds:
        sys.stdout.write("{:.1f} and {:.1f} req/s\n".format(*(run.rate for run in pair)))
    result = {
        "ratio": statistics.median(two.rate / one.rate for two, one in rounds),
        "req_s": statistics.median(two.rate for two, _ in rounds),
        "one_server_req_s": statistics.median(one.rate for _, one in rounds),
        "p99_ms": statistics.median(two.latency_ms(99) for two, _ in rounds),
        "one_server_p99_ms": statistics.median(one.latency_ms(99) for _, one in rounds),
    }
    rounded = {name: round(value, 2) for name, value in result.items()}
    sys.stdout.write(json.dumps({**rounded, "wrong": wrong.total()}) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
