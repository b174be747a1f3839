"""How many replicas does a load need? A simulation, held against a real server.

    python -m benchmarks.sizing
    python -m benchmarks.sizing --simulate 120 --replicas 5 --alone-ms 60 --full-rate 32

Requests of one input come at random (Poisson) and go to the replica with the fewest. A replica
takes what has queued, up to its batch size, in a time that grows with the batch: one input takes
`alone` ms, full batches run at `full` inputs per second, a long input as much longer as it has more
words than others. What finds the queue full is refused.
Without arguments, both are measured on a real server (base shape), and what the simulation says of
two loads is compared with what happens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.contestants import ours, running
from benchmarks.load import closed_loop, open_loop
from benchmarks.models import model_folder, sentences

BATCH, QUEUE = 8, 64
MEASURE_S, LOAD_S = 20.0, 40.0
LOADS = (0.7, 1.5)  # of the rate of full batches
SEED = 5


@dataclass(frozen=True)
class Server:
    """What a replica can do.

    Attributes:
        alone_s: Time of a batch of one input.
        full_rate: Inputs per second in batches of `batch`.
        batch: Inputs in a batch, at most.
        queue: Inputs that wait, at most.
        sizes: Of the inputs that come, one after the other, again and again; their mean is 1.
    """

    alone_s: float
    full_rate: float
    batch: int = BATCH
    queue: int = QUEUE
    sizes: Sequence[float] = (1.0,)

    def seconds(self, size: float) -> float:
        """Return how long a batch takes whose inputs have this size together."""
        more_s = (self.batch / self.full_rate - self.alone_s) / max(1, self.batch - 1)
        return max(0.0, self.alone_s + (size - 1) * more_s)


@dataclass
class Replica:
    """A replica at work: when each of its inputs came, and its size; those in the model apart."""

    waiting: deque[tuple[float, float]] = field(default_factory=deque)
    running: list[tuple[float, float]] = field(default_factory=list)

    @property
    def load(self) -> int:
        """How many inputs it has."""
        return len(self.waiting) + len(self.running)


@dataclass(frozen=True)
class Outcome:
    """What became of a load.

    Attributes:
        rate: Answers per second.
        refused: Share of the requests.
        p50_ms, p99_ms: Of the latencies of the answers.
    """

    rate: float
    refused: float
    p50_ms: float
    p99_ms: float


def simulate(server: Server, replicas: int, rate: float, seconds: float) -> Outcome:
    """Return what becomes of `rate` requests per second that `replicas` share."""
    rng = random.Random(SEED)
    pool = [Replica() for _ in range(replicas)]
    ends: list[tuple[float, int]] = []  # of batches: when, and of which replica
    latencies_s: list[float] = []
    refused = arrivals = 0

    def begin(number: int, now: float) -> None:
        replica = pool[number]
        count = min(server.batch, len(replica.waiting))
        replica.running = [replica.waiting.popleft() for _ in range(count)]
        if count:
            taken_s = server.seconds(sum(size for _, size in replica.running))
            heapq.heappush(ends, (now + taken_s, number))

    now = rng.expovariate(rate)
    while now < seconds:
        while ends and ends[0][0] <= now:
            ended, number = heapq.heappop(ends)
            latencies_s += [ended - came for came, _ in pool[number].running]
            begin(number, ended)
        size = server.sizes[arrivals % len(server.sizes)]
        arrivals += 1
        number = min(range(replicas), key=lambda each: pool[each].load)
        if len(pool[number].waiting) >= server.queue:
            refused += 1
        else:
            pool[number].waiting.append((now, size))
            if not pool[number].running:
                begin(number, now)
        now += rng.expovariate(rate)
    return outcome(latencies_s, refused / arrivals, seconds)


def outcome(latencies_s: Sequence[float], refused: float, seconds: float) -> Outcome:
    """Return the figures of a run."""
    cuts = statistics.quantiles(latencies_s, n=100)
    return Outcome(len(latencies_s) / seconds, refused, cuts[49] * 1000, cuts[98] * 1000)


def measured() -> tuple[Server, list[tuple[float, Outcome]]]:
    """Return what a real server can do, and what became of LOADS of it."""
    mine = ours(model_folder("base"), max_batch_size=BATCH, max_queue_size=QUEUE)
    with running(mine) as server:
        requests = mine.requests()
        one = asyncio.run(closed_loop(server.port, requests, 1, MEASURE_S / 2))
        full = asyncio.run(closed_loop(server.port, requests, 4 * BATCH, MEASURE_S))
        words = [len(text.split()) for text in sentences()]
        sizes = [count / statistics.mean(words) for count in words]
        can = Server(1 / one.rate, full.rate, sizes=sizes)
        found = []
        for share in LOADS:
            rate = share * can.full_rate
            run = asyncio.run(open_loop(server.port, requests, rate, LOAD_S, 2 * QUEUE))
            good = [a.latency_s for a in run.answers if a.status == 200 and a.at_s <= LOAD_S]
            refused = sum(a.status == 503 for a in run.answers) / len(run.answers)
            found.append((rate, outcome(good, refused, LOAD_S)))
    return can, found


def main() -> None:
    """Simulate what the arguments say, or measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulate", type=float, metavar="RATE", help="requests per second")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--alone-ms", type=float, help="time of a batch of one")
    parser.add_argument("--full-rate", type=float, help="inputs per second in full batches")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--queue", type=int, default=512)
    given = parser.parse_args()
    if given.simulate:
        server = Server(given.alone_ms / 1000, given.full_rate, given.batch, given.queue)
        found = simulate(server, given.replicas, given.simulate, seconds=300)
        sys.stdout.write(json.dumps({n: round(v, 3) for n, v in vars(found).items()}) + "\n")
        return
    can, loads = measured()
    sys.stdout.write(f"alone {can.alone_s * 1000:.1f} ms, full batches {can.full_rate:.1f}/s\n")
    ratios = {}
    for share, (rate, real) in zip(LOADS, loads, strict=True):
        said = simulate(can, 1, rate, LOAD_S)
        sys.stdout.write(f"{share:g} of that:\n  simulated {said}\n  measured  {real}\n")
        ratios[f"rate at {share:g}"] = round(said.rate / real.rate, 3)
        ratios[f"p50 at {share:g}"] = round(said.p50_ms / real.p50_ms, 3)
    sys.stdout.write(json.dumps(ratios) + "\n")


if __name__ == "__main__":
    main()
