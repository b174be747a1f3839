"""The load of benchmarks/locustfile.py is understood by the server, and its figures come out."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.servers import Server
from tests.threads import serving
from tests.tiny_causal import saved_causal


def figures(running: Server, folder: Path, *options: str) -> dict[str, dict[str, str]]:
    """Let four users ask for two seconds; return what locust counted, by name."""
    locust = [sys.executable, "-m", "locust", "-f", "benchmarks/locustfile.py", "--headless"]
    load = ["-u", "4", "-r", "4", "-t", "2s", "--host", running.url, "--csv", str(folder / "load")]
    command = [*locust, *load, *options]
    ran = subprocess.run(command, cwd=ROOT, check=False, timeout=60, capture_output=True, text=True)
    assert "Traceback" not in ran.stderr, ran.stderr
    with (folder / "load_stats.csv").open() as file:
        return {row["Name"]: row for row in csv.DictReader(file)}


def test_texts_are_answered(tmp_path: Path) -> None:
    with serving() as running:
        found = figures(running, tmp_path, "--words", "3-9", "--inputs", "2", "Texts")["/"]
    assert int(found["Request Count"]) > 10
    assert found["Failure Count"] == "0"


def test_chats_are_read_and_their_first_token_is_timed(tmp_path: Path) -> None:
    model = saved_causal(tmp_path / "model")
    with serving(model_id=model) as running:
        found = figures(
            running, tmp_path, "--words", "4", "--mask", "", "--new-tokens", "8", "Chats"
        )
    assert found["/v1/chat/completions"]["Failure Count"] == "0"
    assert int(found["first token"]["Request Count"]) > 4
