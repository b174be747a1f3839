"""onequeue against its peers: rates, latencies, overload, costs. Writes docs/benchmarks.md.

    make bench

Servers are measured one at a time, in two rounds of opposite order; a ratio is formed within a
round. Each server is started, warmed up, measured at one load after the other, and stopped.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import costs, report
from benchmarks.answers import Candidates, faults, references
from benchmarks.contestants import Contestant, ours, running
from benchmarks.load import closed_loop, open_loop
from benchmarks.models import SHAPES, model_folder
from benchmarks.peers.table import PEERS
from benchmarks.results import OURS, OVERLOAD, Overload, Point, Results
from config import Settings
from tests.processes import ROOT

SECONDS = {
    "tiny": {1: 2.0, 8: 2.0, 32: 4.0, 128: 4.0},
    "base": {1: 3.0, 8: 5.0, 32: 8.0, 128: 8.0},
}
WARM_UP_S = {"tiny": 2.0, "base": 2.0}
SOME_LOADS = {"tiny": (1, 32), "base": (32,)}  # of settings that are not the best
CLIENTS = 32  # of the rounds that are compared
ROUNDS = 2
DTYPES = ("bfloat16", "int8")
OVERLOAD_S = 10.0
CONNECTIONS = 2048
BUNDLED = ROOT / "models" / "tiny-fill-mask"


@dataclass(frozen=True)
class Entrant:
    """A server with a setting, as measured.

    Attributes:
        shape: Of the model.
        name: Of the server.
        setting: As tables show it.
        contestant: How it is run.
        natural: Whether the setting is that of its documentation.
        batch: Its largest batch.
        loads: Numbers of clients in the first round.
        exact: Whether its answers must be those of float32.
    """

    shape: str
    name: str
    setting: str
    contestant: Contestant
    natural: bool
    batch: int
    loads: Sequence[int]
    exact: bool = True


def entrants(shape: str) -> list[Entrant]:
    """Return all that is measured with the model of `shape`; ours first."""
    model = model_folder(shape)
    all_loads = tuple(SECONDS[shape])
    batch = Settings.model_fields["max_batch_size"].default
    found = [Entrant(shape, OURS, "defaults", ours(model), True, batch, all_loads)]
    for dtype in DTYPES if shape == "base" else ():
        contestant = ours(model, dtype=dtype)
        name = f"{OURS}, {dtype}"
        found.append(
            Entrant(shape, name, f"DTYPE={dtype}", contestant, True, batch, all_loads, False)
        )
    for peer in PEERS:
        for setting in dict.fromkeys((peer.natural, peer.best[shape])):
            contestant, natural = peer.serving(shape, setting), setting == peer.natural
            loads = all_loads if setting == peer.best[shape] else SOME_LOADS[shape]
            name = contestant.name
            found.append(
                Entrant(shape, name, str(setting), contestant, natural, setting.batch, loads)
            )
    return found


def measure(
    entrant: Entrant, loads: Sequence[int], expected: Sequence[Candidates], turn: int
) -> list[Point]:
    """Run a server and measure it at each of `loads`; `turn` is the round."""
    requests = entrant.contestant.requests()
    points = []
    with running(entrant.contestant) as server:
        asyncio.run(closed_loop(server.port, requests, CLIENTS, WARM_UP_S[entrant.shape]))
        for clients in loads:
            seconds = SECONDS[entrant.shape][clients]
            run = asyncio.run(closed_loop(server.port, requests, clients, seconds))
            point = Point(
                shape=entrant.shape,
                server=entrant.name,
                setting=entrant.setting,
                natural=entrant.natural,
                batch=entrant.batch,
                clients=clients,
                round=turn,
                rate=run.rate,
                p50_ms=run.latency_ms(50),
                p99_ms=run.latency_ms(99),
                faults=dict(faults(run.answers, expected if entrant.exact else None)),
            )
            points.append(point)
            tell(
                f"{point.shape}, {point.server} ({point.setting}), {clients} clients: "
                f"{point.rate:.1f} req/s, p50 {point.p50_ms:.1f} ms {point.faults or ''}"
            )
    return points


def compare(shape: str, results: Results) -> None:
    """Measure all servers with the model of `shape`, in rounds."""
    expected = references(model_folder(shape))
    order = entrants(shape)
    for turn in range(ROUNDS):
        for entrant in order[:: -1 if turn % 2 else 1]:
            loads = entrant.loads if turn == 0 else (CLIENTS,)
            try:
                results.points += measure(entrant, loads, expected, turn)
            except RuntimeError as error:
                skip(results, f"{shape}, {entrant.name} ({entrant.setting})", error)


def overload(shape: str) -> Overload:
    """Send OVERLOAD times what onequeue can do, after measuring what it can."""
    model = model_folder(shape)
    contestant = ours(model)
    requests = contestant.requests()
    with running(contestant) as server:
        asyncio.run(closed_loop(server.port, requests, CLIENTS, WARM_UP_S[shape]))
        closed = [
            asyncio.run(closed_loop(server.port, requests, clients, SECONDS[shape][clients]))
            for clients in (CLIENTS, 4 * CLIENTS)
        ]
        capacity = max(run.rate for run in closed)
        rate = OVERLOAD * capacity
        run = asyncio.run(open_loop(server.port, requests, rate, OVERLOAD_S, CONNECTIONS))
    wrong = faults(run.answers, references(model))
    refused = wrong.pop(f"status {Settings.model_fields['overload_status'].default}", 0)
    bound_ms = Settings.model_fields["max_queue_size"].default / capacity * 1000
    tell(
        f"{shape}, {rate:.1f} req/s sent, capacity {capacity:.1f}: {run.rate:.1f} answered, "
        f"{refused} refused"
    )
    return Overload(capacity, rate, run.rate, run.latency_ms(99), bound_ms, dict(wrong), run.unsent)


def measure_costs(results: Results) -> None:
    """Measure what does not depend on peers."""
    base = model_folder("base")
    for shape in SHAPES:
        results.overloads[shape] = overload(shape)
    results.memory = costs.memory(base)
    results.overhead_ms = costs.overhead_ms(base)
    for dtype in DTYPES:
        for name, model in (("base shape", base), ("bundled model", BUNDLED)):
            try:
                results.agreements[f"{dtype}, {name}"] = costs.agreement(model, dtype)
            except RuntimeError as error:
                skip(results, f"{dtype}, {name}", error)


def skip(results: Results, what: str, error: RuntimeError) -> None:
    """Note that something could not be measured, and go on."""
    reason = str(error).strip().rpartition("\n")[2]
    results.notes.append(f"{what}: not measured: {reason}")
    tell(results.notes[-1])


def tell(line: str) -> None:
    """Show progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure everything, keep it, and write the report."""
    started = time.monotonic()
    results = Results(machine=report.machine())
    for shape in SHAPES:
        compare(shape, results)
        results.save()
    measure_costs(results)
    tell(f"measured for {(time.monotonic() - started) / 60:.0f} minutes")
    results.save()
    tell(report.write(results))


if __name__ == "__main__":
    main()
