"""Find the best setting of each peer at 32 clients; the winners are pinned in `table`.

    python -m benchmarks.peers.search tiny base

First workers and threads (no more than cores), then the largest batch, then the variants.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from benchmarks.contestants import running
from benchmarks.load import closed_loop
from benchmarks.peers.setting import Setting
from benchmarks.peers.table import PEERS, Peer

CLIENTS = 32
WARM_UP_S = {"tiny": 1.0, "base": 2.0}
MEASURE_S = {"tiny": 4.0, "base": 10.0}
FIRST_BATCH = 4
WAIT_MS = 1


def measure(peer: Peer, shape: str, setting: Setting) -> float:
    """Return the requests per second of a peer, 0 if it does not run."""
    contestant = peer.serving(shape, setting)
    try:
        with running(contestant) as server:
            requests = contestant.requests()
            asyncio.run(closed_loop(server.port, requests, CLIENTS, WARM_UP_S[shape]))
            rate = asyncio.run(closed_loop(server.port, requests, CLIENTS, MEASURE_S[shape])).rate
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
        rate = 0.0
    sys.stdout.write(f"{shape} {contestant.name}: {setting}: {rate:.1f} req/s\n")
    sys.stdout.flush()
    return rate


def search(peer: Peer, shape: str) -> Setting:
    """Return the best setting found."""
    rates: dict[Setting, float] = {}

    def best_of(settings: Iterable[Setting]) -> list[Setting]:
        for setting in settings:
            if setting not in rates:
                rates[setting] = measure(peer, shape, setting)
        return sorted(rates, key=lambda setting: rates[setting], reverse=True)

    first = replace(peer.natural, batch=min(FIRST_BATCH, max(peer.batches)), wait_ms=WAIT_MS)
    pairs = best_of(replace(first, workers=w, threads=t) for w, t in ((1, 1), (1, 2), (2, 1)))
    best = best_of(replace(pairs[0], batch=batch) for batch in peer.batches)
    return best_of(replace(best[0], variant=variant) for variant in peer.variants)[0]


def main() -> None:
    """Search the shapes named on the command line."""
    for shape, peer in product(sys.argv[1:], PEERS):
        sys.stdout.write(f"{shape} {peer.contestant.name}: best is {search(peer, shape)}\n")


if __name__ == "__main__":
    main()
