"""What Ray Serve costs: one replica of onequeue behind Ray's proxy against onequeue itself.

    python -m benchmarks.ray_serve
    RAY_SERVE_ENABLE_HA_PROXY=1 python -m benchmarks.ray_serve

Base shape, 8 clients, in turns. Both run in the environment of the peers, with as many threads;
the one that waits takes no processor, but for a tenth of a core of Ray's. The last line is JSON:
the ratio of the rates (median of the rounds), rates and p50 (medians) and how many answers were
wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
from dataclasses import replace

from benchmarks.answers import faults, references
from benchmarks.contestants import PEERS_PYTHON, PORT, ours, running
from benchmarks.load import Run, closed_loop
from benchmarks.models import model_folder
from config import available_cpus

CLIENTS = 8
WARM_UP_S = 4.0
ROUND_S = 8.0
ROUNDS = 7
START_S = 300.0


def serve_on_ray(port: int) -> None:
    """Serve the model of the settings with one replica, which has all cores, until SIGTERM."""
    import ray
    from ray import serve

    from deploy.ray_serve import Options, app

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    cpus = available_cpus()
    ray.init(num_cpus=cpus, include_dashboard=False)
    serve.start(http_options={"port": port})
    serve.run(app(Options(num_cpus=cpus)))
    stopped.wait()
    serve.shutdown()
    ray.shutdown()


def measure(folder: str) -> list[tuple[Run, Run]]:
    """Run both servers and measure them in turns; return the rounds, that of Ray Serve first.

    Args:
        folder: Where Ray may write; its name is short, as sockets must have it.
    """
    plain = ours(model_folder("base"))
    plain = replace(plain, command=(PEERS_PYTHON, *plain.command[1:]), start_s=START_S)
    told = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    on_ray = replace(
        plain,
        name="Ray Serve",
        command=(PEERS_PYTHON, "-m", "benchmarks.ray_serve", PORT),
        variables={**plain.variables, **own, **told},
    )
    requests = plain.requests()
    rounds = []
    with running(on_ray) as one, running(plain) as other:
        for turn in range(ROUNDS + 1):
            seconds = ROUND_S if turn else WARM_UP_S
            ports = [one.port, other.port][:: -1 if turn % 2 else 1]
            runs = {p: asyncio.run(closed_loop(p, requests, CLIENTS, seconds)) for p in ports}
            rounds.append((runs[one.port], runs[other.port]))
            sys.stdout.write("{:.1f} and {:.1f} req/s\n".format(*(r.rate for r in rounds[-1])))
            sys.stdout.flush()
    return rounds[1:]


def main() -> None:
    """Measure, compare the answers with those of the pipeline, print."""
    with tempfile.TemporaryDirectory(prefix="onequeue-ray-", ignore_cleanup_errors=True) as folder:
        rounds = measure(folder)
    answers = [answer for pair in rounds for run in pair for answer in run.answers]
    wrong = faults(answers, references(model_folder("base")))
    result = {
        "ratio": statistics.median(one.rate / other.rate for one, other in rounds),
        "req_s": statistics.median(one.rate for one, _ in rounds),
        "plain_req_s": statistics.median(other.rate for _, other in rounds),
        "p50_ms": statistics.median(one.latency_ms(50) for one, _ in rounds),
        "plain_p50_ms": statistics.median(other.latency_ms(50) for _, other in rounds),
    }
    rounded = {name: round(value, 2) for name, value in result.items()}
    sys.stdout.write(json.dumps({**rounded, "wrong": wrong.total()}) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_on_ray(int(sys.argv[1]))
    else:
        main()
