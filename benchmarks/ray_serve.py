"""What Ray Serve costs: one replica of onequeue behind Ray's proxy against onequeue itself.

    python -m benchmarks.ray_serve
    RAY_SERVE_ENABLE_HA_PROXY=1 python -m benchmarks.ray_serve

Base shape, 8 clients, in turns. Both run in the environment of the peers, with as many threads;
the one that waits takes no processor, but for a tenth of a core of Ray's. The last line is JSON:
the ratio of the rates, rates and latencies (medians of the rounds) and how many answers were wrong.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from dataclasses import replace

from benchmarks.answers import faults, references
from benchmarks.contestants import PEERS_PYTHON, PORT, ours, running
from benchmarks.models import model_folder
from benchmarks.turns import Rounds, in_turns, tell
from cpus import available_cpus

CLIENTS = 8
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


def measure(folder: str) -> Rounds:
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
    with running(on_ray) as one, running(plain) as other:
        return in_turns(((one.port, requests), (other.port, requests)), CLIENTS, ROUND_S, ROUNDS)


def main() -> None:
    """Measure, compare the answers with those of the pipeline, print."""
    with tempfile.TemporaryDirectory(prefix="onequeue-ray-", ignore_cleanup_errors=True) as folder:
        rounds = measure(folder)
    answers = [answer for pair in rounds for run in pair for answer in run.answers]
    tell(rounds, "plain", faults(answers, references(model_folder("base"))))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_on_ray(int(sys.argv[1]))
    else:
        main()
