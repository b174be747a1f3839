"""A real server in a real process on a real port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import START_S, Server, free_port

ROOT = Path(__file__).parent.parent
STOP_S = 4.0
END_S = 20.0  # shorter than what tests hold a stop up with


@dataclass
class Process(Server):
    """A server in a process of its own."""

    process: subprocess.Popen[bytes] = field(kw_only=True)
    log_file: Path = field(kw_only=True)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_open(self) -> None:
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.connect().close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError(self.log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


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
def server(target: str, folder: Path, *arguments: str, **settings: object) -> Iterator[Process]:
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
    running = Process(port, process=process, log_file=log_file)
    try:
        running.wait_until_open()
        yield running
    finally:
        running.leave()
        end(process, STOP_S)  # not at once, so that it can write what it has covered
