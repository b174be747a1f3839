from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from telemetry import JsonFormatter
from tests.processes import ROOT, server


def test_json_log_line_holds_message_and_traceback() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("a.b", 40, "f", 1, "it is %s", ("bad\n",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["level"] == "error"
    assert fields["logger"] == "a.b"
    assert "cause" not in fields
    assert fields["message"] == "it is bad\n"
    assert "ValueError: no" in fields["exception"]


def test_every_line_of_the_process_is_json_when_asked(tmp_path: Path) -> None:
    with server("server:app", tmp_path, log_format="json") as running:
        running.wait_until_ready()
        running.post("no mask")
        assert running.stop() == 0
        lines = [json.loads(line) for line in running.log.splitlines()]
    assert {"uvicorn.error", "telemetry"} <= {line["logger"] for line in lines}
    (request,) = [line for line in lines if line["logger"] == "telemetry"]
    assert (request["method"], request["path"], request["status"]) == ("POST", "/", 422)
    assert request["time"].endswith("+00:00")


def test_level_hides_what_is_less_severe(tmp_path: Path) -> None:
    with server("server:app", tmp_path, log_level="error") as running:
        running.wait_until_ready()
        running.stop()
        assert running.log == ""


def test_importing_the_server_imports_no_torch() -> None:
    code = "import server, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
