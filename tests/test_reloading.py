"""A model takes the place of another: nobody is lost, nobody gets a mixture."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from config import Settings
from entries import Request, Switch
from errors import Conflict, LoadError, NotServing, Rejected
from metrics import Metrics
from model import Generator, Model
from queueing import RequestQueue, State
from reloading import Reloader
from tests.fakes import FakeGenerator, FakeModel, Gate
from tests.processes import ROOT, server
from tests.servers import Server
from tests.test_metrics import scraped
from tests.threads import after, serving
from worker import Worker

pytestmark = pytest.mark.anyio

BUNDLED = ROOT / "models/tiny-fill-mask"
ADMIN = {"authorization": "Bearer sesame"}
RELOADS = int(os.environ.get("RELOADS", "2"))
CLIENTS = 32
TEXTS = ["the [MASK] of the king", "a [MASK].", "water is a [MASK] and a [MASK]"]


def request(*inputs: str) -> Request:
    return Request(inputs, {}, asyncio.get_running_loop().time() + 10)


def model_of(name: str, hook: Callable[[list[str]], None] = lambda texts: None) -> FakeModel:
    return FakeModel(hook, info={"model_id": name, "task": "fill-mask"})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Shelf:
    """Models by their id; loading waits while `gate` holds it."""

    models: dict[str, Model | Generator | Exception]
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[Settings] = field(default_factory=list)

    def __call__(self, settings: Settings) -> Model | Generator:
        self.asked.append(settings)
        assert self.gate.wait(5)
        found = self.models[settings.model_id]
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class Running:
    queue: RequestQueue
    worker: Worker
    reloader: Reloader


@asynccontextmanager
async def working(first: Model | Generator, load: Shelf, **settings: Any) -> AsyncIterator[Running]:
    options = Settings(model_id="old", revision="r1", **settings)
    queue = RequestQueue(options, Metrics())
    worker = Worker(options, queue, lambda: first)
    task = asyncio.create_task(worker.run())
    await until(lambda: queue.state is not State.LOADING)
    yield Running(queue, worker, Reloader(options, queue, worker, load))
    assert (queue.depth, queue.in_flight) == (0, set())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_was_admitted_before_is_answered_by_the_old_model() -> None:
    gate = Gate()
    old, new = model_of("old", gate), model_of("new")
    shelf = Shelf({"new": new})
    shelf.gate.set()
    async with working(old, shelf) as run:
        before = [asyncio.create_task(run.queue.submit(request("held")))]
        await until(gate.arrived.is_set)
        before += [asyncio.create_task(run.queue.submit(request(text))) for text in "ab"]
        await until(lambda: run.queue.depth == 2)
        reload = asyncio.create_task(run.reloader.reload("new"))
        await until(lambda: shelf.asked)
        await until(lambda: any(isinstance(each, Switch) for each in run.queue._entries._queue))  # type: ignore[attr-defined]
        assert run.reloader.progress["state"] == "loading"
        after = [asyncio.create_task(run.queue.submit(request(text))) for text in "cd"]
        await until(lambda: run.queue.depth == 4)
        gate.opened.set()
        await asyncio.gather(*before, *after)
        done = await reload
    assert (old.batches, new.batches) == ([["held"], ["a", "b"]], [["c", "d"]])
    assert (done["model_id"], done["revision"], done["state"]) == ("new", None, "done")
    assert run.worker.model is new
    assert new.memory.reclaimed == 1
    assert old.memory.reclaimed == 0


async def test_two_at_once_are_one_and_a_conflict() -> None:
    shelf = Shelf({"new": model_of("new")})
    shelf.gate.set()
    async with working(model_of("old"), shelf) as run:
        both = [run.reloader.reload("new"), run.reloader.reload("new")]
        done, refused = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(done, Mapping)
    assert isinstance(refused, Conflict)


async def test_a_revision_alone_is_of_the_model_of_the_settings() -> None:
    shelf = Shelf({"old": model_of("old")})
    shelf.gate.set()
    async with working(model_of("old"), shelf) as run:
        done = await run.reloader.reload(revision="r2")
    assert (done["model_id"], done["revision"]) == ("old", "r2")


async def test_idle_server_switches_at_once() -> None:
    shelf = Shelf({"old": model_of("old"), "new": model_of("new")})
    shelf.gate.set()
    async with working(model_of("first"), shelf) as run:
        await run.reloader.reload("new", "r2")
        await run.reloader.reload()
        metrics = run.queue.metrics.written().decode()
    asked = [(each.model_id, each.revision, each.task) for each in shelf.asked]
    assert asked == [("new", "r2", "fill-mask"), ("old", "r1", "fill-mask")]
    assert 'onequeue_reloads_total{outcome="done"} 2.0' in metrics


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LoadError("cannot load model 'bad': the weights lack it"), "the weights lack it"),
        (ValueError("secret"), "^cannot load model 'bad'$"),
    ],
)
async def test_failure_leaves_the_old_model_where_it_is(error: Exception, text: str) -> None:
    shelf = Shelf({"bad": error})
    shelf.gate.set()
    async with working(model_of("old"), shelf) as run:
        with pytest.raises(Rejected, match=text):
            await run.reloader.reload("bad")
        assert run.reloader.progress["state"] == "failed"
        assert not run.reloader.busy
        (response,) = await run.queue.submit(request("a"))
        assert response.output == "A"
        metrics = run.queue.metrics.written().decode()
    assert 'onequeue_reloads_total{outcome="failed"} 1.0' in metrics


async def test_only_one_at_a_time_and_the_old_model_answers_meanwhile() -> None:
    shelf = Shelf({"new": model_of("new")})
    async with working(model_of("old"), shelf) as run:
        reload = asyncio.create_task(run.reloader.reload("new"))
        await until(lambda: shelf.asked)
        assert run.reloader.busy
        assert run.reloader.progress["state"] == "loading"
        with pytest.raises(Conflict, match="'new' is loading"):
            await run.reloader.reload("other")
        await run.queue.submit(request("a"))
        reload.cancel()  # the client hangs up; the reload goes on
        shelf.gate.set()
        await until(lambda: not run.reloader.busy)
        assert run.worker.model is shelf.models["new"]


async def test_a_server_that_stops_loads_nothing_more() -> None:
    async with working(model_of("old"), Shelf({})) as run:
        run.queue.stop_admitting()
        with pytest.raises(NotServing):
            await run.reloader.reload("new")


async def test_generating_models_overlap_until_the_old_one_has_said_all() -> None:
    old, new = FakeGenerator(), FakeGenerator()
    shelf = Shelf({"new": new})
    shelf.gate.set()
    async with working(old, shelf, max_batch_size=1) as run:
        first, second = (asyncio.create_task(run.queue.submit(request(text))) for text in "ab")
        await until(lambda: "a" in old.running)
        reload = asyncio.create_task(run.reloader.reload("new"))
        await until(lambda: run.worker.model is new)
        with pytest.raises(Conflict, match="'new' takes over"):
            await run.reloader.reload("new")
        third = asyncio.create_task(run.queue.submit(request("c")))
        await until(lambda: "c" in new.running)
        new.end("c", "C")
        assert (await third)[0].output.text == "C"
        assert not old.closed
        assert run.worker.busy_since is not None
        old.end("a", "A")
        await until(lambda: "b" in old.running)  # admitted before, so it is the old one's
        old.end("b", "B")
        assert [(await each)[0].output.text for each in (first, second)] == ["A", "B"]
        assert (await reload)["state"] == "done"
        assert old.closed
        assert run.worker.busy_since is None
    assert new.closed


def other_model(folder: Path) -> Path:
    """Save the bundled model with other weights."""
    folder.mkdir()
    for file in BUNDLED.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(BUNDLED / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reload(running: Server, **body: Any) -> httpx.Response:
    url = running.url + "/admin/reload"
    return httpx.post(url, json=body, headers=ADMIN, timeout=120)


def sequences(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return json.dumps([[row["token"] for row in rows] for rows in flat(answer.json())])


def flat(answers: list[Any]) -> list[Any]:
    return [each for answer in answers for each in ([answer] if "token" in answer[0] else answer)]


def test_reloads_under_load_lose_nothing_and_mix_nothing(tmp_path: Path) -> None:
    other = other_model(tmp_path / "other")
    with server("server:app", tmp_path, admin_key="sesame", log_level="warning") as running:
        running.wait_until_ready()
        right = {"old": sequences(running.client.post(running.url, json={"inputs": TEXTS}))}
        assert reload(running, model_id=str(other)).status_code == 200
        right["new"] = sequences(running.client.post(running.url, json={"inputs": TEXTS}))
        assert right["old"] != right["new"]
        stop = threading.Event()
        found: Counter[str] = Counter()

        def client() -> None:
            with httpx.Client(timeout=60) as http:
                while not stop.is_set():
                    found[sequences(http.post(running.url, json={"inputs": TEXTS}))] += 1

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client) for _ in range(CLIENTS)]
            try:
                for number in range(RELOADS):
                    name = str(BUNDLED if number % 2 == 0 else other)
                    answer = reload(running, model_id=name)
                    assert answer.status_code == 200, answer.text
                    assert running.get("/info").json()["model_id"] == name
            finally:
                stop.set()
            for each in clients:
                each.result()
        found_metrics = scraped(running)
        assert found.keys() == set(right.values())
        assert found_metrics["requests_total{code=200,outcome=ok}"] == found.total() + 2
        assert found_metrics["reloads_total{outcome=done}"] == RELOADS + 1
        assert running.gauges() == (0, 0)
        report = f"{RELOADS} reloads under {CLIENTS} clients: {found.total()} answers, none lost"
        sys.stderr.write(f"\n{report}\n")


def test_the_door_to_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opened = threading.Event()
    with serving(after(opened), ready=False, admin_key="sesame,other") as running:
        assert reload(running).status_code == 503  # still loading
        opened.set()
        running.wait_until_ready()
        url = running.url + "/admin/reload"
        assert httpx.post(url).status_code == 401
        assert httpx.post(url, headers={"authorization": "Bearer sesames"}).status_code == 401
        for body in ("[]", '{"model": "x"}', '{"model_id": 5}', '{"model_id": ""}', "{"):
            answer = httpx.post(url, content=body, headers=ADMIN)
            assert answer.status_code == 422, body
        answer = reload(running, model_id="/nowhere")
        assert answer.status_code == 422
        assert "there is no such folder" in answer.json()["error"]
        assert running.get("/info").json()["reload"]["state"] == "failed"
        assert running.post("a [MASK].").status_code == 200
        answer = httpx.post(url, headers={"authorization": "Bearer other"}, timeout=60)
        assert answer.json()["model_id"] == str(BUNDLED)
        assert "serving" in caplog.text
        assert "sesame" not in caplog.text + running.get("/info").text


def test_without_a_key_there_is_no_door(tmp_path: Path) -> None:
    with server("tests.apps:slow", tmp_path, batch_s=0) as running:
        assert reload(running).status_code == 404


def test_hangup_signal_loads_the_model_of_the_settings_anew(tmp_path: Path) -> None:
    with server("tests.apps:slow", tmp_path, batch_s=0, load_s="0 0 60") as running:
        running.wait_until_ready()
        running.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while scraped(running).get("reloads_total{outcome=done}") != 1:
            assert time.monotonic() < deadline, running.log
            time.sleep(0.05)
        assert running.post("a [MASK].").status_code == 200
        running.process.send_signal(signal.SIGHUP)
        while running.log.count("loading model") < 2:
            time.sleep(0.01)
        assert running.stop() == 0  # the model is on its way, for a minute
