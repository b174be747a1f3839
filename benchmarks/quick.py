"""onequeue against the server of the transformers documentation, in less than a minute.

    python -m benchmarks.quick

Tiny shape, 32 clients, in turns. The last line is JSON: the ratio of the rates (median of the
rounds), both rates (medians) and how many answers were wrong.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys

from benchmarks.answers import faults, references
from benchmarks.contestants import ours, running
from benchmarks.load import Run, closed_loop
from benchmarks.models import model_folder
from benchmarks.peers.table import DOCS_PAGE

CLIENTS = 32
WARM_UP_S = 2.0
ROUND_S = 2.0
ROUNDS = 3


def main() -> None:
    """Run both servers and measure them in turns; the one that waits takes no processor."""
    expected = references(model_folder("tiny"))
    mine, peer = ours(model_folder("tiny")), DOCS_PAGE.serving("tiny", DOCS_PAGE.natural)
    with running(mine) as my_server, running(peer) as peer_server:

        def measure(seconds: float) -> tuple[Run, Run]:
            return (
                asyncio.run(closed_loop(my_server.port, mine.requests(), CLIENTS, seconds)),
                asyncio.run(closed_loop(peer_server.port, peer.requests(), CLIENTS, seconds)),
            )

        measure(WARM_UP_S)
        rounds = [measure(ROUND_S) for _ in range(ROUNDS)]
    wrong = faults([answer for pair in rounds for run in pair for answer in run.answers], expected)
    for pair in rounds:
        sys.stdout.write("{:.1f} and {:.1f} req/s\n".format(*(run.rate for run in pair)))
    result = {
        "ratio": statistics.median(mine.rate / peer.rate for mine, peer in rounds),
        "req_s": statistics.median(mine.rate for mine, _ in rounds),
        "peer_req_s": statistics.median(peer.rate for _, peer in rounds),
    }
    rounded = {name: round(value, 2) for name, value in result.items()}
    sys.stdout.write(json.dumps({**rounded, "wrong": wrong.total()}) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
