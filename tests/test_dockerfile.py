"""deploy/Dockerfile without Docker: what it takes is all that serves, read-only, as nobody."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from config import Settings
from tests.dockerfile import PATH, copied, health_command, only, pairs
from tests.processes import ROOT, Process
from tests.servers import free_port

NOBODY = 65534


def test_dockerfile_has_no_fault() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    subprocess.run([hadolint, "--failure-threshold", "style", PATH], check=True)
    assert only("CMD").json  # else a shell stands between the server and SIGTERM
    assert only("STOPSIGNAL").args == ["SIGTERM"]


def imported(start: str) -> set[str]:
    """Return the files of this repository that `start` imports, at any depth and any time."""
    seen: set[str] = set()
    rest = [start]
    while rest:
        name = rest.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            for path in (module.replace(".", "/") for module in modules):
                parents = [f"{parent}/__init__.py" for parent in Path(path).parents][:-1]
                files = [f"{path}.py", f"{path}/__init__.py", *parents]
                rest += {each for each in files if (ROOT / each).is_file()} - seen
    return seen


def test_image_holds_what_the_server_imports_and_no_more() -> None:
    places = copied()
    assert all(name == place for name, place in places.items())
    assert {name for name in places if name.endswith(".py")} == imported("server.py")
    assert f"{Settings().model_id}/config.json" in places


@contextmanager
def image(folder: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Lay out /app and the folders that may be written to; nothing in /app may change."""
    app = folder / "app"
    for name, place in copied().items():
        (app / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, app / place)
    for name in ("cache", "tmp"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    found = sorted(app.rglob("*"))
    for path in (app, *found):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    variables = pairs("ENV") | {"UVICORN_HOST": "127.0.0.1", "UVICORN_PORT": str(free_port())}
    places = {"HF_HOME": str(folder / "cache"), **dict.fromkeys(("HOME", "TMPDIR"), folder / "tmp")}
    variables |= {name: str(place) for name, place in places.items()}
    yield app, variables | {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    assert sorted(app.rglob("*")) == found


def as_user(*command: str) -> list[str]:
    """Run as nobody, if we are root; it may still read where tests and interpreter are."""
    if os.getuid() != 0:
        return [*command]
    reads = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "+dac_read_search"]
    ids = ["--reuid", f"{NOBODY}", "--regid", f"{NOBODY}", "--clear-groups", "--no-new-privs"]
    return ["setpriv", *ids, *reads, *command]


def test_image_serves_read_only_as_nobody_and_drains(tmp_path: Path) -> None:
    with image(tmp_path) as (app, variables), (tmp_path / "log").open("wb") as log:
        write = as_user(sys.executable, "-c", "open('written', 'w')")
        assert subprocess.run(write, cwd=app, capture_output=True, check=False).returncode == 1
        command = as_user(sys.executable, "-m", *only("CMD").args)
        process = subprocess.Popen(command, cwd=app, env=variables, stdout=log, stderr=log)
        port = int(variables["UVICORN_PORT"])
        running = Process(port, process=process, log_file=tmp_path / "log")
        python, *words = health_command()
        check = [sys.executable, *words]
        assert python == "python"
        try:
            running.wait_until_open()
            running.wait_until_ready()
            subprocess.run(as_user(*check), cwd=app, env=variables, check=True, timeout=10)
            assert running.post("test [MASK]").status_code == 200
            assert running.stop() == 0, running.log
        finally:
            process.kill()
            running.leave()
        assert subprocess.run(check, env=variables, capture_output=True, check=False).returncode
