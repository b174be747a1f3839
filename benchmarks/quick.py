"""onequeue against the server of the transformers documentation, in less than a minute.

    python -m benchmarks.quick

Tiny shape, 32 clients, in turns. The last line is JSON: the ratio of the rates, rates and latencies
(medians of the rounds) and how many answers were wrong.
"""

from __future__ import annotations

from benchmarks.answers import faults, references
from benchmarks.contestants import ours, running
from benchmarks.models import model_folder
from benchmarks.peers.table import DOCS_PAGE
from benchmarks.turns import in_turns, tell

CLIENTS = 32
ROUND_S = 2.0
ROUNDS = 3


def main() -> None:
    """Run both servers and measure them in turns."""
    expected = references(model_folder("tiny"))
    mine, peer = ours(model_folder("tiny")), DOCS_PAGE.serving("tiny", DOCS_PAGE.natural)
    with running(mine) as one, running(peer) as other:
        servers = (one.port, mine.requests()), (other.port, peer.requests())
        rounds = in_turns(servers, CLIENTS, ROUND_S, ROUNDS)
    answers = [answer for pair in rounds for run in pair for answer in run.answers]
    tell(rounds, "peer", faults(answers, expected))


if __name__ == "__main__":
    main()
