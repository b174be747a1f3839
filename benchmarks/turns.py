"""Two servers that run at the same time and are measured in turns; who waits takes no processor."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from benchmarks.load import Run, closed_loop

Rounds = Sequence[tuple[Run, Run]]
Asked = tuple[int, Sequence[bytes]]  # the port of a server, and the requests that it gets


def in_turns(servers: tuple[Asked, Asked], clients: int, seconds: float, rounds: int) -> Rounds:
    """Return the runs of two servers, one of each per round; print their rates.

    Each begins every other round, and a first one that warms them up is left out.

    Args:
        servers: That run.
        clients: In a closed loop.
        seconds: Of a run.
        rounds: How many.
    """
    found = []
    for number in range(rounds + 1):
        order = servers[:: -1 if number % 2 else 1]
        first, second = (asyncio.run(closed_loop(*asked, clients, seconds)) for asked in order)
        pair = (second, first) if number % 2 else (first, second)
        if number:
            found.append(pair)
            sys.stdout.write("{:.1f} and {:.1f} req/s\n".format(*(run.rate for run in pair)))
            sys.stdout.flush()
    return found


def tell(rounds: Rounds, other: str, wrong: Counter[str]) -> NoReturn:
    """Print a line of JSON, the ratio of the rates and medians of both, and end the process.

    Args:
        rounds: Of `in_turns`.
        other: Name of the second server.
        wrong: Answers that were; with any, the exit code is 1.
    """
    result = {"ratio": statistics.median(one.rate / two.rate for one, two in rounds)}
    for prefix, runs in zip(("", f"{other}_"), zip(*rounds, strict=True), strict=True):
        result[f"{prefix}req_s"] = statistics.median(run.rate for run in runs)
        for percent in (50, 99):
            latency_ms = statistics.median(run.latency_ms(percent) for run in runs)
            result[f"{prefix}p{percent}_ms"] = latency_ms
    rounded = {name: round(value, 2) for name, value in result.items()}
    sys.stdout.write(json.dumps({**rounded, "wrong": wrong.total()}) + "\n")
    sys.exit(1 if wrong else 0)
