"""A real nginx with deploy/nginx.conf, in a folder, as whoever runs the tests."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT, end
from tests.servers import free_port

START_S = 20.0
STOP_S = 4.0
LOG_S = 5.0
CONFIGURATION = ROOT / "deploy" / "nginx.conf"
KINDS = ("body", "proxy", "fastcgi", "uwsgi", "scgi")  # of temporary files, each has a folder

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@dataclass(frozen=True)
class Try:
    """A line of the access log: which servers were tried for a request, and what they said."""

    ports: Sequence[int]
    statuses: tuple[int, ...]


@dataclass(frozen=True)
class Nginx:
    """A running nginx.

    Attributes:
        port: Where clients come in.
        inner: Ports of the inner proxy, in the order of the servers.
    """

    folder: Path
    port: int
    inner: Sequence[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tries(self, ids: Collection[str] = ()) -> dict[str, Try]:
        """Read the access log, by the ids of requests; wait until it has `ids`."""
        deadline = time.monotonic() + LOG_S
        while not set(ids) <= (found := self._tries()).keys():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    def _tries(self) -> dict[str, Try]:
        line = re.compile(r"\S+ (?P<id>\S+) .* \[(?P<to>.*)\] \[(?P<said>.*)\]")
        found = [line.fullmatch(each) for each in self._log("access.log").splitlines()]
        return {
            each["id"]: Try(
                [int(port) for port in re.findall(r":(\d+)", each["to"])],
                tuple(int(status) for status in re.findall(r"\d+", each["said"])),
            )
            for each in found
            if each
        }

    def errors(self) -> str:
        return self._log("error.log")

    def _log(self, name: str) -> str:
        return (self.folder / name).read_text()


def configuration(folder: Path, servers: tuple[int, int]) -> tuple[str, dict[str, int]]:
    """Return deploy/nginx.conf with other ports and folders, and the ports under their old names.

    Args:
        servers: Ports of the two servers.
    """
    ports = {name: free_port() for name in ("80", "9000", "9001", "9099")}
    ports |= dict(zip(("8000", "8001"), servers, strict=True))
    text = re.sub(
        r"(?<=listen )80\b|(?<=[:_])(8000|8001|9000|9001|9099)\b",
        lambda found: ("127.0.0.1:" if found[0] == "80" else "") + str(ports[found[0]]),
        CONFIGURATION.read_text(encoding="utf-8"),
    )
    text = text.replace("/var/log/nginx", str(folder)).replace("/run/nginx.pid", f"{folder}/pid")
    own = "".join(
        f"    {'client_body' if kind == 'body' else kind}_temp_path {folder / kind};\n"
        for kind in KINDS
    )
    return text.replace("http {\n", "http {\n" + own, 1), ports


@contextmanager
def nginx(folder: Path, servers: tuple[int, int]) -> Iterator[Nginx]:
    """Run nginx before the servers at two ports; end it at the end."""
    text, ports = configuration(folder, servers)
    file = folder / "nginx.conf"
    file.write_text(text, encoding="utf-8")
    with (folder / "nginx.out").open("wb") as output:
        process = subprocess.Popen(
            ["nginx", "-p", str(folder), "-c", str(file), "-g", "daemon off;"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_until_open(process, ports["80"], folder)
        yield Nginx(folder, ports["80"], (ports["9000"], ports["9001"]))
    finally:
        end(process, STOP_S)


def _wait_until_open(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.01)
    raise AssertionError((folder / "nginx.out").read_text())
