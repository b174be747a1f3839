"""A running server, as its clients see it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

import httpx

START_S = 60.0
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A running server on a real port."""

    port: int
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30, limits=NO_LIMITS))
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, self.get("/info").text
            time.sleep(0.02)

    def leave(self) -> None:
        """Close what its clients have open."""
        self.client.close()
        for connection in self.connections:
            connection.close()
