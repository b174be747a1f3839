"""Write docs/benchmarks.md and its charts from what the suite measured.

python -m benchmarks.report
"""

from __future__ import annotations

import datetime
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.charts import Bar, Line, bar_chart, line_chart
from benchmarks.models import SHAPES
from benchmarks.results import OURS, Point, Results, median, select, targets
from cpus import available_cpus
from tests.processes import ROOT

DOCS = ROOT / "docs"
CLIENTS = 32
REQUIREMENTS = Path(__file__).with_name("requirements.txt")

INTRODUCTION = """\
# Benchmarks

onequeue against other ways to serve the same fill-mask model over HTTP, on one machine. Measured
and written by `make bench`.

Every server answers the same 500 English sentences (7 to 127 tokens, mean 26) with the top 5 of
`[MASK]`. Clients are closed loops: each sends its next request when the last was answered. All
answers are compared with those of the untouched pipeline in float32, one text at a time: the same
five words in the same order, scores within 1e-5 (and 0.1 %). Models have random weights: *base* is
BERT-base, *tiny* has 2 layers of 128; both have 30,522 words. onequeue runs with its defaults.
"""

METHOD = """\
## How it is measured

* One server runs at a time, on the same cores as the load generator. Each is warmed up first.
* All are measured in two rounds of opposite order; figures are medians over rounds, and a ratio is
  formed within a round.
* Peers run twice: as their documentation has it, with batches of up to 32 where they batch, and
  with the best setting found for 32 clients. `python -m benchmarks.peers.search` tries all; for the
  tiny shape it did, for the base shape twenty of the likeliest were tried. "2 x 1 threads,
  batch 4" means two processes with one torch thread each and batches of up to 4. Variants are
  explained in the files of [benchmarks/peers](../benchmarks/peers).
* The rate counts answers up to the last one that came in time. Latencies leave out the first
  request of each client: these come all at once, and wait less than those that follow.
* Overload is a Poisson process of requests that do not wait for each other. Latencies count from
  the moment a request was due.

## Reproduce

```console
make bench         # all of this page, about 35 minutes; needs 10 GB of disk and 8 GB of memory
make bench-quick   # against the server of the transformers documentation, in a minute
make bench-limit   # against the limit of the processor
```
"""


def write(results: Results) -> str:
    """Write the page and the charts; return the targets as text."""
    DOCS.mkdir(exist_ok=True)
    asked = _targets(results)
    sections = [INTRODUCTION, _machine(results), "## Targets\n\n" + asked, _charts(results)]
    sections += [_rates(results, shape) for shape in SHAPES]
    sections += [_overload(results), _costs(results), METHOD]
    (DOCS / "benchmarks.md").write_text("\n".join(filter(None, sections)), encoding="utf-8")
    return asked


def machine() -> list[str]:
    """Describe the machine, the versions and the day."""
    processor = _line_of("/proc/cpuinfo", "model name")
    memory_gib = int(_line_of("/proc/meminfo", "MemTotal").split()[0]) / 2**20
    ours = [f"{name} {version(name)}" for name in ("torch", "transformers", "starlette", "uvicorn")]
    peers = re.findall(r"^(\w+)(?:\[\w+\])?==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    return [
        f"{processor}, {available_cpus()} cores, {memory_gib:.0f} GiB of memory, "
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, {', '.join(ours)}",
        ", ".join(" ".join(peer) for peer in peers),
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    ]


def _line_of(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _machine(results: Results) -> str:
    return "".join(f"* {line}\n" for line in results.machine + results.notes)


def _targets(results: Results) -> str:
    return _table(
        ("what", "measured", "target", ""),
        [
            (
                target.text,
                "–" if target.value is None else f"{target.value:.2f}",
                f"{'≤' if target.at_most else '≥'} {target.bound:g}",
                target.verdict,
            )
            for target in targets(results)
        ],
    )


def _rates(results: Results, shape: str) -> str:
    counts = sorted({point.clients for point in results.points if point.shape == shape})
    servers: dict[tuple[str, str], dict[int, list[Point]]] = {}
    for clients in counts:
        for server, points in select(results.points, shape, clients).items():
            servers.setdefault(server, {})[clients] = points
    ordered = sorted(servers.items(), key=lambda item: -median(item[1][CLIENTS]))
    header = ["server", "setting", *(f"{n} client{'s' if n > 1 else ''}" for n in counts)]
    rows = [
        [*server, *(_cell(loads.get(clients, ())) for clients in counts)]
        for server, loads in ordered
    ]
    about = "Requests per second, then p50 and p99 of the latency in ms."
    return f"## {shape.capitalize()}\n\n{about}\n\n{_table(header, rows)}"


def _cell(points: Sequence[Point]) -> str:
    if not points:
        return ""
    rate, p50, p99 = (median(points, what) for what in ("rate", "p50_ms", "p99_ms"))
    wrong = sum(sum(point.faults.values()) for point in points)
    text = f"**{_number(rate)}** · {_number(p50)} / {_number(p99)}"
    return f"{text} · {wrong} WRONG" if wrong else text


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _overload(results: Results) -> str:
    if not results.overloads:
        return ""
    header = ("shape", "capacity", "sent", "right answers", "p99, admitted", "full queue", "else")
    rows = [
        (
            shape,
            f"{it.capacity:.1f}/s",
            f"{it.rate:.1f}/s",
            f"{it.goodput:.1f}/s",
            f"{it.p99_ms:.0f} ms",
            f"{it.bound_ms:.0f} ms",
            ", ".join(f"{n} {kind}" for kind, n in {**it.faults, "unsent": it.unsent}.items() if n)
            or "none",
        )
        for shape, it in results.overloads.items()
    ]
    about = (
        "Requests at five times the capacity, whatever is answered: the queue fills, the rest is "
        "refused at once. A full queue takes as long as its column says to drain."
    )
    return f"## Overload\n\n{about}\n\n{_table(header, rows)}"


def _costs(results: Results) -> str:
    lines = [
        f"* {what}: {share:.1%} of the sentences have the first answer of float32.\n"
        for what, share in results.agreements.items()
    ]
    if results.memory:
        ours, pipeline = (size / 2**20 for size in results.memory)
        lines.append(
            f"* A batch of 32 texts of 128 tokens (base) raises the peak memory by {ours:.0f} MiB; "
            f"the pipeline with `batch_size=32`: by {pipeline:.0f} MiB.\n"
        )
    if results.overhead_ms:
        served, direct = results.overhead_ms
        lines.append(
            f"* One client (base): p50 {served:.2f} ms over HTTP, {direct:.2f} ms for direct calls "
            "of the model with the same texts.\n"
        )
    return "## Costs\n\n" + "".join(lines) if lines else ""


def _charts(results: Results) -> str:
    bars = {shape: _bars(results, shape) for shape in SHAPES}
    lines = {shape: _lines(results, shape) for shape in SHAPES}
    legend = "dark: best setting, light: as documented"
    chart = bar_chart("Requests per second, 32 clients", legend, bars)
    (DOCS / "throughput.svg").write_text(chart, encoding="utf-8")
    chart = line_chart("Median latency by number of clients", "best settings", lines)
    (DOCS / "latency.svg").write_text(chart, encoding="utf-8")
    return (
        "![Requests per second of each server, 32 clients](throughput.svg)\n\n"
        "![Median latency of each server by number of clients](latency.svg)\n"
    )


def _bars(results: Results, shape: str) -> list[Bar]:
    """Return a bar per server: its best rate, and that of its documentation's setting."""
    rates: dict[str, list[tuple[float, bool]]] = {}
    for (server, _), points in select(results.points, shape, CLIENTS).items():
        rates.setdefault(server, []).append((median(points), points[0].natural))
    return [
        Bar(
            server,
            max(rate for rate, _ in found),
            None if server.startswith(OURS) else next((r for r, natural in found if natural), None),
            server.startswith(OURS),
        )
        for server, found in rates.items()
    ]


def _lines(results: Results, shape: str) -> list[Line]:
    """Return a line per server that was measured at every load."""
    loads: dict[tuple[str, str], dict[float, list[float]]] = {}
    for point in results.points:
        if point.shape == shape:
            by_clients = loads.setdefault((point.server, point.setting), {})
            by_clients.setdefault(point.clients, []).append(point.p50_ms)
    most = max(map(len, loads.values()))
    return [
        Line(
            server,
            [(n, statistics.median(values)) for n, values in sorted(found.items())],
            server.startswith(OURS),
        )
        for (server, _), found in loads.items()
        if len(found) == most
    ]


if __name__ == "__main__":
    sys.stdout.write(write(Results.load()))
