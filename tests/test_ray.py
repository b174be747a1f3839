"""onequeue on Ray Serve: a real cluster of one node, at times two, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("ray", reason="pip install -r deploy/requirements-ray.txt")

from ray import serve
from ray.cluster_utils import Cluster
from starlette.applications import Starlette

from config import Settings
from deploy.ray_serve import Options, application
from server import create_app
from tests.fakes import FakeModel, FakePrepared
from tests.models import assert_same
from tests.processes import ROOT, environment, server
from tests.servers import free_port
from tests.tiny_causal import saved_causal

pytestmark = pytest.mark.timeout(180)

CLIENTS = 8
BATCH_S = 0.05
TWO_REPLICAS = 1.3 / BATCH_S  # per second, more than one can, one by one
ONE_BY_ONE = Settings(max_batch_size=1, log_level="error")
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
}


class Telling(FakeModel):
    """Answers every text with the id of its process, in BATCH_S; "die" ends the model thread."""

    def run(self, batch: Sequence[FakePrepared]) -> Sequence[Any]:
        if any(prepared.text == "die" for prepared in batch):
            raise SystemExit
        time.sleep(BATCH_S)
        return [os.getpid() for _ in batch]


def telling(settings: Settings) -> Starlette:
    return create_app(settings, lambda _: Telling())


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Answer(NamedTuple):
    at_s: float
    status: int
    text: str


class Load:
    """CLIENTS that each send their next request when the last was answered."""

    def __init__(self, url: str) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._stopped = False
        self._clients = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        for client in self._clients:
            client.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopped:
                try:
                    response = client.post(self._url, content="a text")
                    status, text = response.status_code, response.text
                except httpx.TransportError as error:
                    status, text = 0, str(error)
                self.answers.append(Answer(time.monotonic(), status, text))

    def since(self, start_s: float) -> list[Answer]:
        return [answer for answer in self.answers if answer.at_s >= start_s]

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status != 200]

    def replicas(self) -> set[int]:
        """Return the processes that answered in the last second."""
        last = self.since(time.monotonic() - 1)
        return {int(answer.text) for answer in last if answer.status == 200}

    def rate(self, seconds: float = 2) -> float:
        """Measure how many answers come per second."""
        start_s = time.monotonic()
        time.sleep(seconds)
        return len(self.since(start_s)) / seconds


class Site:
    """Ray with Serve on it, and where it answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{free_port()}"
        serve.start("HeadOnly", {"port": int(self.url.rpartition(":")[2])})

    def run(self, settings: Settings = ONE_BY_ONE, **options: Any) -> None:
        """Serve `telling`."""
        serve.run(application(Options(**options), settings, telling))


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for those of Ray's sockets."""
    folder = tempfile.mkdtemp(prefix="onequeue-ray-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        while Path(folder).exists():  # the last processes write as they end
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    import ray

    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        for name, value in {**RAY, "RAY_TMPDIR": str(folder)}.items():
            patch.setenv(name, value)
        (folder / "ray").mkdir()
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            ray.init(cluster.address, log_to_driver=False)
            yield Site(cluster)
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


REQUESTS: list[tuple[str, dict[str, str]]] = [
    ("Paris is the [MASK] of France.", {}),
    ('{"inputs": ["a [MASK]", "b [MASK] c [MASK]"], "parameters": {"top_k": 2}}', {}),
    ("no mask", {}),
    ("", {}),
    ("[MASK]", {"content-type": "image/png"}),
    ("[MASK] " * 300, {"x-request-id": "mine"}),
]


def test_command_line_serves_what_the_plain_server_serves(site: Site, tmp_path: Path) -> None:
    settings = {"max_batch_size": 7, "max_body_bytes": 2000}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
    subprocess.run(
        [*command, "--address", site.cluster.address, "deploy.ray_serve:app", "num_cpus=2"],
        cwd=ROOT,
        env=environment(**settings) | RAY,
        check=True,
        capture_output=True,
    )
    limits = httpx.get(f"{site.url}/info").json()["limits"]
    assert (limits["max_batch_size"], limits["num_threads"]) == (7, 2)
    with server("server:app", tmp_path, **settings) as plain:
        plain.wait_until_ready()
        for body, headers in REQUESTS:
            kind = {"content-type": "application/json"} if body.startswith("{") else {}
            one, other = (
                httpx.post(url, content=body, headers=kind | headers)
                for url in (site.url, plain.url)
            )
            assert one.status_code == other.status_code
            assert_same(one.json(), other.json())
            assert one.headers.keys() == other.headers.keys()


def test_full_queue_is_refused_through_the_proxy(site: Site) -> None:
    site.run(Settings(max_batch_size=1, max_queue_size=1, log_level="error"))
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        answers = list(pool.map(lambda _: httpx.post(site.url, content="a"), range(2 * CLIENTS)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    for answer in refused:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error_type"] == "overloaded"


def test_stream_arrives_in_pieces(site: Site, tmp_path: Path) -> None:
    settings = Settings(model_id=saved_causal(tmp_path), log_level="error")
    serve.run(application(Options(), settings))
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 300}}
    arrived_s = [time.monotonic()]
    with httpx.stream("POST", f"{site.url}/generate_stream", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        arrived_s += [time.monotonic() for _ in response.iter_raw()]
    assert len(arrived_s) > 30
    assert arrived_s[1] - arrived_s[0] < (arrived_s[-1] - arrived_s[0]) / 2


def test_an_update_loses_nothing_and_a_dead_replica_what_it_held(site: Site) -> None:
    site.run()
    with Load(site.url) as load:
        site.run(num_replicas=2)
        wait_until(lambda: len(load.replicas()) == 2)
        assert load.rate() > TWO_REPLICAS
        assert load.failures == []

        killed = load.replicas().pop()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(load.replicas() - {killed}) == 2)
        assert load.rate() > TWO_REPLICAS
        assert len(load.failures) <= CLIENTS  # it held no more

        healthy = load.replicas()
        httpx.post(site.url, content="die")
        wait_until(lambda: len(load.replicas() - healthy) == 1)
        known = len(load.failures)
        assert load.rate() > TWO_REPLICAS

        site.run(num_replicas=1)
        wait_until(lambda: len(load.replicas()) == 1)
        assert len(load.failures) == known


def test_load_brings_a_replica_and_a_lost_node_costs_what_it_held(site: Site) -> None:
    node = site.cluster.add_node(**NODE)
    site.run(max_replicas=2, target_ongoing_requests=2, upscale_delay_s=1, num_cpus=2)
    with Load(site.url) as load:
        wait_until(lambda: len(load.replicas()) == 2)  # one on each node: there is no more room
        assert load.rate() > TWO_REPLICAS
        assert load.failures == []

        site.cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: len(load.replicas()) == 1)
        assert load.rate() > 0

        site.cluster.add_node(**NODE)
        wait_until(lambda: len(load.replicas()) == 2)
        assert load.rate() > TWO_REPLICAS
    assert len(load.failures) <= CLIENTS
