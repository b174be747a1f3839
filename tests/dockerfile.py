"""deploy/Dockerfile, read: what it sets, and what of this repository it takes."""

from __future__ import annotations

import os
import subprocess
from fnmatch import fnmatch
from typing import Any

from e2b_dockerfile_utils import PatternMatcher, parse_dockerfile_ast

from tests.processes import ROOT

PATH = ROOT / "deploy" / "Dockerfile"
INSTRUCTIONS = parse_dockerfile_ast(PATH.read_text()).instructions
LAST_FROM = max(at for at, line in enumerate(INSTRUCTIONS) if line.name == "FROM")
BUILD, FINAL = INSTRUCTIONS[:LAST_FROM], INSTRUCTIONS[LAST_FROM:]


def only(name: str) -> Any:
    """Return the one instruction of that name that the image ends up with."""
    (found,) = [line for line in FINAL if line.name == name]
    return found


def pairs(name: str) -> dict[str, str]:
    """Return what the image's ENV or LABEL sets."""
    words = [word.strip('"') for line in FINAL if line.name == name for word in line.args]
    return dict(zip(words[::3], words[1::3], strict=True))


def health_command() -> list[str]:
    kind, *words = only("HEALTHCHECK").args
    assert kind == "CMD"
    assert only("HEALTHCHECK").json
    return [str(word) for word in words]


def copied() -> dict[str, str]:
    """Return the files of the repository that go into /app, and where there."""
    ignored = PatternMatcher((ROOT / ".dockerignore").read_text().splitlines())
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    context = [name for name in tracked if not ignored.matches(name)]
    places: dict[str, str] = {}
    folder = ""
    for line in BUILD:
        folder = line.args[0] if line.name == "WORKDIR" else folder
        for source in line.args[:-1] if line.name == "COPY" and folder == "/app" else ():
            found = [name for name in context if "/" not in name and fnmatch(name, source)]
            inside = [name for name in context if name.startswith(f"{source}/")]
            assert found or inside, source
            target = line.args[-1].removesuffix("/")
            places |= {name: f"{target}/{name}" for name in found}
            places |= {name: f"{target}{name.removeprefix(source)}" for name in inside}
    assert set(context) - set(places) == {"requirements.txt"}  # else the context holds too much
    return {name: os.path.normpath(place) for name, place in places.items()}
