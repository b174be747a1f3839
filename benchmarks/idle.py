"""What a server costs that nobody asks: processor time and memory.

    python -m benchmarks.idle

Prints a line of JSON: of one core, the share that a ready server takes, and its memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.processes import server

SETTLE_S = 5.0
MEASURE_S = 60.0


def main() -> None:
    """Start a server with the bundled model, leave it alone, print."""
    with tempfile.TemporaryDirectory() as folder, server("server:app", Path(folder)) as running:
        running.wait_until_ready()
        process = psutil.Process(running.process.pid)
        time.sleep(SETTLE_S)
        before, started = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(MEASURE_S)
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)
        mib = process.memory_info().rss / 2**20
    sys.stdout.write(json.dumps({"cpu": round(share, 5), "rss_mib": round(mib)}) + "\n")


if __name__ == "__main__":
    main()
