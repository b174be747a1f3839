"""Servers under test: how each is started, asked and stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks import load
from benchmarks.models import FOLDER, sentences
from tests.processes import ROOT, end, environment
from tests.servers import free_port

START_S = 90.0
STOP_S = 20.0
PEERS_PYTHON = str(FOLDER.parent / "venv" / "bin" / "python")
PORT = "{port}"  # in commands and variables


def raw(text: str) -> bytes:
    """Return the body of a server that takes the text itself."""
    return text.encode()


def named(text: str) -> bytes:
    """Return the body of a server that takes JSON with a field."""
    return json.dumps({"text": text}).encode()


def named_list(text: str) -> bytes:
    """Return the body of a server that takes JSON with a list of texts."""
    return json.dumps({"texts": [text]}).encode()


@dataclass(frozen=True)
class Contestant:
    """A server that can be measured.

    Attributes:
        name: As it stands in tables.
        command: Starts it in the repository root.
        variables: What the environment says on top of the usual.
        path: Where it is asked.
        content_type: Of the body.
        body: Makes the body for a text.
        start_s: How long it may take to its first answer.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    path: str = "/"
    content_type: str = "text/plain"
    body: Callable[[str], bytes] = raw
    start_s: float = START_S

    def requests(self) -> list[bytes]:
        """Return the requests for all sentences."""
        return [load.post(self.body(text), self.path, self.content_type) for text in sentences()]


def ours(model: Path, **settings: object) -> Contestant:
    """Return onequeue serving the model in a folder."""
    settings = {"model_id": model, "log_level": "error"} | settings
    return Contestant(
        "onequeue",
        (sys.executable, "-m", "uvicorn", "server:app", "--port", PORT),
        {name.upper(): str(value) for name, value in settings.items()},
    )


@dataclass(frozen=True)
class Server:
    """A running contestant."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Return where it is, without a path."""
        return f"http://{load.HOST}:{self.port}"


@contextmanager
def running(contestant: Contestant) -> Iterator[Server]:
    """Run a server in a process group of its own and wait for its first answer.

    Raises:
        RuntimeError: It does not answer in time; the text has the end of what it wrote.
    """
    port = free_port()
    fill = {PORT: str(port)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [fill.get(word, word) for word in contestant.command],
            cwd=ROOT,
            start_new_session=True,
            env=environment() | {k: fill.get(v, v) for k, v in contestant.variables.items()},
            stdout=log,
            stderr=log,
        )
        server = Server(port, process.pid)
        try:
            if not _answers(contestant, server, process):
                log.seek(0)
                raise RuntimeError(f"{contestant.name}: {log.read()[-2000:].decode()}")
            yield server
        finally:
            end(process, STOP_S)


def _answers(contestant: Contestant, server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Ask until there is an answer; tell whether there was."""
    url = server.url + contestant.path
    headers = {"content-type": contestant.content_type}
    body = contestant.body(sentences()[0])
    end = time.monotonic() + contestant.start_s
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.post(url, content=body, headers=headers, timeout=10).status_code == 200:
                return True
        time.sleep(0.1)
    return False
