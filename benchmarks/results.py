"""What the suite measured, and the ratios that are asked of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from tests.processes import ROOT

FILE = ROOT / ".benchmarks" / "results.json"
OURS = "onequeue"
NATURAL_BATCH = 32
OVERLOAD = 5  # times the capacity


@dataclass(frozen=True)
class Point:
    """One closed loop of one server.

    Attributes:
        shape: Of the model.
        server: Name of the server.
        setting: How it was run.
        natural: Whether that is the setting of its documentation.
        batch: Its largest batch.
        clients: Number of clients.
        round: Servers measured in the same round are compared with each other.
        rate: Right answers per second.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency.
        faults: What was wrong with answers, by kind.
    """

    shape: str
    server: str
    setting: str
    natural: bool
    batch: int
    clients: int
    round: int
    rate: float
    p50_ms: float
    p99_ms: float
    faults: dict[str, int]


@dataclass(frozen=True)
class Overload:
    """An open loop at several times the capacity.

    Attributes:
        capacity: Right answers per second of the best closed loop.
        rate: Requests sent per second.
        goodput: Right answers per second.
        p99_ms: Of the requests that were admitted.
        bound_ms: Time that a full queue takes to drain at `capacity`.
        faults: Answers that are neither right nor a refusal, by kind.
        unsent: Requests that found no free connection.
    """

    capacity: float
    rate: float
    goodput: float
    p99_ms: float
    bound_ms: float
    faults: dict[str, int]
    unsent: int


@dataclass
class Results:
    """All that was measured; costs are missing where a dtype is not served."""

    points: list[Point] = field(default_factory=list)
    overloads: dict[str, Overload] = field(default_factory=dict)
    agreements: dict[str, float] = field(default_factory=dict)
    memory: tuple[int, int] | None = None
    overhead_ms: tuple[float, float] | None = None
    machine: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Keep the results for `python -m benchmarks.report`."""
        FILE.write_bytes(TypeAdapter(Results).dump_json(self, indent=1))

    @classmethod
    def load(cls) -> Results:
        """Return what was kept."""
        return TypeAdapter(Results).validate_json(FILE.read_bytes())


@dataclass(frozen=True)
class Target:
    """A figure that is asked for; `value` is None if it could not be measured."""

    text: str
    value: float | None
    bound: float
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """Return pass, miss or, without a value, not measured."""
        if self.value is None:
            return "not measured"
        good = self.value <= self.bound if self.at_most else self.value >= self.bound
        return "pass" if good else "miss"


def key(point: Point) -> tuple[str, str]:
    """Return what tells servers apart within a shape."""
    return point.server, point.setting


def select(points: Iterable[Point], shape: str, clients: int) -> dict[tuple[str, str], list[Point]]:
    """Return the points of one load by server, each by round."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        if (point.shape, point.clients) == (shape, clients):
            found.setdefault(key(point), []).append(point)
    return found


def median(points: Iterable[Point], what: str = "rate") -> float:
    """Return the median over rounds of a field."""
    return float(statistics.median(getattr(point, what) for point in points))


def ratio(mine: Iterable[Point], peer: Iterable[Point], what: str = "rate") -> float:
    """Return the median over rounds of our figure over that of a peer in the same round."""
    theirs = {point.round: getattr(point, what) for point in peer}
    pairs = [(getattr(point, what), theirs.get(point.round)) for point in mine]
    return float(statistics.median(own / other for own, other in pairs if other))


def best_peer(
    servers: dict[tuple[str, str], list[Point]], what: str = "rate", natural: bool = False
) -> list[Point]:
    """Return the points of the fastest peer.

    Args:
        servers: The points of one load.
        what: "rate", or a latency.
        natural: Only settings of a documentation, with batches of NATURAL_BATCH.
    """
    peers = [
        points
        for (server, _), points in servers.items()
        if not server.startswith(OURS)
        and (not natural or (points[0].natural and points[0].batch == NATURAL_BATCH))
    ]
    if what == "rate":
        return max(peers, key=median)
    return min(peers, key=lambda points: median(points, what))


def against_peers(
    points: Sequence[Point],
    load: tuple[str, int],
    mine: str = OURS,
    what: str = "rate",
    natural: bool = False,
) -> float | None:
    """Return the ratio of our figure to the best peer's, or None if ours is missing.

    Args:
        points: All that was measured.
        load: Shape and number of clients.
        mine: Which of our servers.
        what: "rate", or a latency.
        natural: Only compare with settings of a documentation, with batches of NATURAL_BATCH.
    """
    servers = select(points, *load)
    own = [points for (server, _), points in servers.items() if server == mine]
    return ratio(own[0], best_peer(servers, what, natural), what) if own else None


def targets(results: Results) -> list[Target]:
    """Return every figure that is asked for with what was measured."""
    return [*_speed(results.points), *_costs(results)]


def _speed(points: Sequence[Point]) -> Iterator[Target]:
    tiny = "tiny, 32 clients: req/s over the best peer's"
    natural = against_peers(points, ("tiny", 32), natural=True)
    yield Target(f"{tiny} with batches of 32", natural, 12)
    yield Target(f"{tiny} at its best setting", against_peers(points, ("tiny", 32)), 7)
    p50 = against_peers(points, ("tiny", 1), what="p50_ms")
    yield Target("tiny, 1 client: p50 over the best peer's", p50, 0.8, at_most=True)
    for dtype, name, bound in (
        ("float32", OURS, 3.0),
        ("bfloat16", f"{OURS}, bfloat16", 5.5),
        ("int8", f"{OURS}, int8", 7.5),
    ):
        text = f"base, 32 clients, {dtype}: req/s over the best peer's at its best setting"
        yield Target(text, against_peers(points, ("base", 32), name), bound)


def _costs(results: Results) -> Iterator[Target]:
    for shape, overload in results.overloads.items():
        text = f"{shape}, {OVERLOAD} times the capacity: right answers/s over the capacity"
        yield Target(text, overload.goodput / overload.capacity, 0.95)
    memory, overhead_ms = results.memory, results.overhead_ms
    text = "base, 32 texts of 128 tokens: growth of the peak memory over the pipeline's"
    yield Target(text, memory[0] / memory[1] if memory else None, 0.4, at_most=True)
    text = "base, 1 client: p50 over HTTP less p50 of the model alone, ms"
    cost_ms = overhead_ms[0] - overhead_ms[1] if overhead_ms else None
    yield Target(text, cost_ms, 1.5, at_most=True)
