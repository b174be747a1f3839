"""A real server in a real process on a real port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
START_S = 60.0
STOP_S = 4.0
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A running server; `log` holds what it wrote."""

    process: subprocess.Popen[bytes]
    port: int
    log_file: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30, limits=NO_LIMITS))
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def post(self, text: str) -> httpx.Response:
        return self.client.post(self.url, content=text.encode())

    def connect(self) -> socket.socket:
        """Return a raw connection; it is closed with the server at the latest."""
        self.connections.append(socket.create_connection(("127.0.0.1", self.port), timeout=30))
        return self.connections[-1]

    def gauges(self) -> tuple[int, int]:
        """Return queue depth and requests in flight."""
        info = self.get("/info").json()
        return info["queue_depth"], info["in_flight"]

    def wait_until(self, gauges: tuple[int, int]) -> None:
        """Wait until the gauges stand at `gauges`."""
        deadline = time.monotonic() + 10
        while (now := self.gauges()) != gauges:
            assert time.monotonic() < deadline, now
            time.sleep(0.005)

    def wait_until_open(self) -> None:
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.connect().close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError(self.log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_S)


def end(process: subprocess.Popen[bytes], stop_s: float) -> None:
    """Ask a process to end; after `stop_s` kill it; kill what is left of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(stop_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command(target: str, port: int) -> list[str]:
    factory = ["--factory"] if not target.startswith("server:") else []
    return [sys.executable, "-m", "uvicorn", target, *factory, "--port", str(port)]


def environment(**settings: object) -> dict[str, str]:
    """Return an environment with `settings` in upper case, and nothing else a server would read."""
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
    values = {name: os.environ[name] for name in kept if name in os.environ}
    values |= {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    values |= {"HF_HUB_OFFLINE": "1"}
    return values | {name.upper(): str(value) for name, value in settings.items()}


@contextmanager
def server(target: str, folder: Path, *arguments: str, **settings: object) -> Iterator[Server]:
    """Run `target` with `settings`, in a process group of its own; end it at the end."""
    port = free_port()
    log_file = folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command(target, port), *arguments],
            cwd=ROOT,
            start_new_session=True,
            env=environment(ran=folder / "ran", **settings),
            stdin=subprocess.DEVNULL,  # a terminal would change what SIGHUP does
            stdout=log,
            stderr=log,
        )
    running = Server(process, port, log_file)
    try:
        running.wait_until_open()
        yield running
    finally:
        running.client.close()
        for connection in running.connections:
            connection.close()
        end(process, STOP_S)  # not at once, so that it can write what it has covered
