"""What the README says is so: its commands run, its tables equal the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from config import Settings
from errors import RequestError
from server import STATUS
from tests.models import assert_same
from tests.processes import ROOT
from tests.servers import Server

README = (ROOT / "README.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table that starts with `header`."""
    table = README.partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def shown_default(name: str) -> str:
    field = Settings.model_fields[name]
    if field.default is PydanticUndefined:
        return "from the cgroup quota"
    value: Any = field.default
    if value is None:
        return "from the model" if name == "task" else "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}".removesuffix(".0")


def test_settings_table_equals_the_settings() -> None:
    assert rows("name | default | meaning") == [
        [f"`{name.upper()}`", shown_default(name), str(field.description).removesuffix(".")]
        for name, field in Settings.model_fields.items()
    ]


def kinds(kind: type[RequestError]) -> set[tuple[str, str]]:
    return {(str(STATUS[each]), each.error_type) for each in STATUS if issubclass(each, kind)}


def test_error_table_equals_the_mapping() -> None:
    told = {(status, error_type) for status, error_type, _ in rows("status | error_type | when")}
    assert told == kinds(RequestError) - {("499", "validation")}  # hang-ups get no answer


COMMANDS = re.findall(r"```console\n(curl .*)\n```\n```json\n(.*)\n```", README)


def test_every_curl_shows_its_output() -> None:
    assert len(COMMANDS) == README.count("```console\ncurl") == 2


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_curl_lines_print_what_is_shown(command: str, output: str, bundled: Server) -> None:
    words = shlex.split(command.replace("localhost:8000", f"127.0.0.1:{bundled.port}"))
    assert_same(json.loads(subprocess.check_output([*words, "-s"])), json.loads(output))


def test_python_line_works(bundled: Server) -> None:
    (line,) = re.findall(r"`huggingface_hub\.(InferenceClient\(.*\))`", README)
    line = line.replace(":8000", f":{bundled.port}")
    code = f"from huggingface_hub import InferenceClient; print(len({line}))"
    online = {**os.environ, "HF_HUB_OFFLINE": "0"}  # offline, it refuses localhost too
    assert subprocess.check_output([sys.executable, "-c", code], env=online) == b"5\n"


@pytest.mark.parametrize("target", ["serve", "test"])
def test_make_knows_the_two_commands(target: str) -> None:
    assert f"```console\nmake {target}\n```" in README
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_every_path_in_the_house_is_there() -> None:
    rooms = README.partition("```text\n")[2].partition("```")[0]
    assert rooms
    for line in rooms.splitlines():
        assert (ROOT / line.split()[0]).exists()
