"""Routes, errors and lifespan, in process, around a fake model."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

import errors
from api import door
from config import Settings
from model import Spent
from queueing import State
from server import STATUS, create_app
from tests.fakes import FakeModel, Gate


@contextmanager
def client_for(model: FakeModel, **settings: Any) -> Iterator[TestClient]:
    app = create_app(Settings(**settings), load=lambda _: model)
    with TestClient(app, raise_server_exceptions=False) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


@pytest.fixture
def client() -> Iterator[TestClient]:
    with client_for(FakeModel()) as client:
        yield client


def test_curl_line_works(client: TestClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = client.post("/", content="test [MASK]", headers=headers)
    assert answer.status_code == 200
    assert answer.json() == "TEST [MASK]"


@pytest.mark.parametrize("path", ["/", "/predict", "/invocations"])
def test_json_works_on_every_path(client: TestClient, path: str) -> None:
    assert client.post(path, json={"inputs": ["a", "b"]}).json() == ["A", "B"]


def test_answer_carries_timing_headers_and_the_request_id() -> None:
    model = FakeModel(lambda _: time.sleep(0.02), spent=Spent(0.01, 0))
    with client_for(model) as client:
        answer = client.post("/", content="a", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.headers["x-batch-size"] == "1"
    assert answer.headers["x-inference-time"] == "10.0"
    assert 20 <= float(answer.headers["x-total-time"]) < 5000
    assert 0 <= float(answer.headers["x-queue-time"]) < float(answer.headers["x-total-time"])


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "é"])
def test_unusable_request_id_is_replaced(client: TestClient, given: str) -> None:
    answer = client.get("/livez", headers=[(b"x-request-id", given.encode())])
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "error_type"),
    [
        ("POST", "/", b"", {}, 400, "empty"),
        ("POST", "/", b"\xff", {}, 400, "validation"),
        ("POST", "/", b"{", {"content-type": "application/json"}, 400, "validation"),
        ("POST", "/", b"{}", {"content-type": "application/json"}, 422, "validation"),
        ("POST", "/", b"invalid", {}, 422, "validation"),
        ("POST", "/", b"x", {"content-type": "image/png"}, 415, "validation"),
        ("POST", "/", b"x", {"content-encoding": "gzip"}, 415, "validation"),
        ("POST", "/", b"x", {"x-request-timeout": "soon"}, 422, "validation"),
        ("POST", "/", b"x", {"x-request-timeout": "-1"}, 422, "validation"),
        ("POST", "/", b"x", {"x-request-timeout": "nan"}, 422, "validation"),
        ("GET", "/nowhere", b"", {}, 404, "validation"),
        ("GET", "/predict", b"", {}, 405, "validation"),
        ("PUT", "/", b"x", {}, 405, "validation"),
        ("POST", "/predict/", b"x", {}, 404, "validation"),
        ("POST", "/livez", b"x", {}, 405, "validation"),
        ("POST", "/", b"fail", {}, 424, "backend"),
    ],
)
def test_bad_request_gets_its_status_in_the_error_shape(
    method: str, path: str, body: bytes, headers: dict[str, str], status: int, error_type: str
) -> None:
    with client_for(FakeModel(raise_on_fail)) as client:
        answer = client.request(method, path, content=body, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.json()["error_type"] == error_type
    assert answer.headers["x-request-id"]


def raise_on_fail(texts: list[str]) -> None:
    if "fail" in texts:
        raise ValueError("secret at 0x7f00")


def test_wrong_method_is_told_which_are_right(client: TestClient) -> None:
    assert client.delete("/").headers["allow"] == "GET, HEAD, POST"


def test_model_failure_is_logged_with_the_request_id_and_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with client_for(FakeModel(raise_on_fail)) as client:
        answer = client.post("/", content="fail", headers={"x-request-id": "abc-2"})
    assert "secret" not in answer.text
    assert "request abc-2: the model failed" in caplog.text
    assert "secret at 0x7f00" in caplog.text


def test_refusal_is_logged_with_the_request_id(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        client.post("/", content="invalid", headers={"x-request-id": "abc-3"})
    (line,) = [record for record in caplog.records if record.name == "telemetry"]
    assert line.message.startswith("request abc-3: POST '/' 422 in ")
    assert line.message.endswith(" ms, invalid: not a valid text")
    assert line.facts["cause"] == "not a valid text"  # type: ignore[attr-defined]


def test_log_shows_every_post_and_no_probes(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        client.get("/livez")
        client.get("/info")
        client.post("/", content="a")
        client.get("/nowhere")
    shown = [(r.facts["path"], r.facts["status"]) for r in caplog.records if hasattr(r, "facts")]
    assert shown == [("/", 200), ("/nowhere", 404)]


def test_every_request_error_has_a_status() -> None:
    def leaves(kind: type[errors.RequestError]) -> list[type[errors.RequestError]]:
        below = kind.__subclasses__()
        return [leaf for each in below for leaf in leaves(each)] if below else [kind]

    assert set(STATUS) == set(leaves(errors.RequestError))


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body_is_413(chunked: bool) -> None:
    with client_for(FakeModel(), max_body_bytes=1000) as client:
        content = iter([b"x" * 1001]) if chunked else b"x" * 1001
        answer = client.post("/", content=content)
    assert answer.status_code == 413
    assert answer.json() == {
        "error": "the body is larger than 1000 bytes",
        "error_type": "too_large",
    }


def test_too_many_inputs_are_413() -> None:
    with client_for(FakeModel(), max_inputs_per_request=2) as client:
        assert client.post("/", json={"inputs": ["a", "b"]}).status_code == 200
        assert client.post("/", json={"inputs": ["a", "b", "c"]}).status_code == 413


def test_list_that_no_queue_could_ever_hold_is_413_and_not_503() -> None:
    with client_for(FakeModel(), max_queue_size=2) as client:
        assert client.post("/", json={"inputs": ["a", "b", "c"]}).status_code == 413


@contextmanager
def full(**settings: Any) -> Iterator[TestClient]:
    """Yield a client of a server whose queue holds all it may until the end of the block."""
    gate = Gate()
    with (
        client_for(FakeModel(gate), max_queue_size=1, **settings) as client,
        ThreadPoolExecutor() as clients,
    ):
        running = clients.submit(client.post, "/", content="runs")
        assert gate.arrived.wait(5)
        queued = clients.submit(client.post, "/", content="waits")
        while client.get("/info").json()["queue_depth"] == 0:
            pass
        yield client
        gate.opened.set()
        assert (running.result().json(), queued.result().json()) == ("RUNS", "WAITS")
        assert client.post("/", content="again").json() == "AGAIN"


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("body", ["short", "long " * 10_000])
def test_full_queue_answers_at_once_and_says_when_to_come_back(status: int, body: str) -> None:
    with full(overload_status=status) as client:
        answer = client.post("/", content=body, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    assert answer.json() == {"error": "the queue is full", "error_type": "overloaded"}
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-request-id"] == "mine"


def test_full_queue_refuses_inference_only() -> None:
    with full() as client:
        assert client.get("/").status_code == 200
        assert client.get("/readyz").status_code == 200
        assert client.post("/nowhere", content="a").status_code == 404


def test_full_queue_that_drains_says_that_it_drains() -> None:
    with full() as client:
        queue = client.app.state.service.queue  # type: ignore[attr-defined]
        queue.stop_admitting()
        answer = client.post("/", content="a")
        queue.state = State.READY
    assert answer.json()["error"] == "the server is draining"
    assert answer.headers["connection"] == "close"


def test_many_refusals_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "LOG_EVERY_S", 0.5)
    with full() as client:
        for _ in range(20):
            assert client.post("/", content="a").status_code == 503
        while "refused" not in caplog.text:
            client.get("/livez")
    lines = [record.message for record in caplog.records if record.name == "api.door"]
    counts = [re.fullmatch(r"the queue is full: (\d+) requests refused", each) for each in lines]
    assert sum(int(each[1]) for each in counts if each) == 20
    assert len(counts) < 5


def test_refusals_are_told_also_when_the_server_stops(caplog: pytest.LogCaptureFixture) -> None:
    with full() as client:
        assert [client.post("/", content="a").status_code for _ in range(3)] == [503] * 3
    lines = [record.message for record in caplog.records if record.name == "api.door"]
    assert lines == ["the queue is full: 3 requests refused"]


def test_each_refusal_has_a_line_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "api.door")
    with full() as client:
        client.post("/", content="a", headers={"x-request-id": "why"})
    (line,) = [each for each in caplog.records if each.message.startswith("request why")]
    told = {"status": 503, "outcome": "rejected", "cause": "the queue is full"}
    assert vars(line)["facts"] == {"request_id": "why", "method": "POST", "path": "/", **told}


def test_client_may_shorten_the_deadline() -> None:
    gate = Gate()
    with client_for(FakeModel(gate)) as client:
        answer = client.post("/", content="a", headers={"x-request-timeout": "0.02"})
        gate.opened.set()
    assert answer.status_code == 504
    assert answer.json()["error_type"] == "timeout"


def test_client_may_not_lengthen_the_deadline() -> None:
    gate = Gate()
    with client_for(FakeModel(gate), request_timeout_s=0.02) as client:
        answer = client.post("/", content="a", headers={"x-request-timeout": "1000"})
        gate.opened.set()
    assert answer.status_code == 504


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer right", 200),
        ("bearer  right", 200),
        ("Bearer wrong", 401),
        ("Bearer rïght", 401),
        ("Basic right", 401),
        ("right", 401),
        ("", 401),
    ],
)
def test_api_key_guards_inference_only(header: str, status: int) -> None:
    with client_for(FakeModel(), api_key="right") as client:
        headers = [(b"authorization", header.encode())]
        answer = client.post("/", content="a", headers=headers)
        assert client.get("/readyz").status_code == 200
        assert client.get("/info").status_code == 200
        assert "right" not in client.get("/info").text
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error_type"] == "unauthorized"


@pytest.mark.parametrize(("given", "status"), [("one", 200), ("two", 200), ("three", 401)])
def test_there_may_be_several_keys(given: str, status: int) -> None:
    with client_for(FakeModel(), api_key="one, two") as client:
        headers = {"authorization": f"Bearer {given}"}
        assert client.post("/", content="a", headers=headers).status_code == status


def test_metrics_may_have_a_key_of_their_own() -> None:
    with client_for(FakeModel(), api_key="api", metrics_key="metrics") as client:
        assert client.get("/metrics").status_code == 401
        headers = {"authorization": "Bearer api"}
        assert client.get("/metrics", headers=headers).status_code == 401
        headers = {"authorization": "Bearer metrics"}
        assert client.get("/metrics", headers=headers).status_code == 200
        assert client.post("/", content="a", headers=headers).status_code == 401
    with client_for(FakeModel(), api_key="api") as client:
        assert client.get("/metrics").status_code == 200


def test_pages_from_elsewhere_may_ask_only_if_they_are_named() -> None:
    origin = {"origin": "https://a.example"}
    asked = {**origin, "access-control-request-method": "POST"}
    with client_for(FakeModel(), cors_origins="https://a.example, https://b.example") as client:
        answer = client.post("/", content="a", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        preflight = client.options("/", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = client.post("/", content="a", headers={"origin": "https://c.example"})
        assert "access-control-allow-origin" not in other.headers
    with client_for(FakeModel()) as client:
        answer = client.post("/", content="a", headers=origin)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_tell_browsers_to_be_careful(client: TestClient, path: str) -> None:
    headers = client.get(path, headers={"accept": "text/html"}).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_probes_while_loading_and_after() -> None:
    gate = Gate()

    def load(_: Settings) -> FakeModel:
        gate([])
        return FakeModel()

    with TestClient(create_app(Settings(), load)) as client:
        assert client.get("/livez").status_code == 200
        assert client.get("/info").json()["state"] == "loading"
        assert client.get("/").json()["task"] is None
        for path in ("/readyz", "/health", "/ping"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert answer.json() == {"error": "the server is loading", "error_type": "unhealthy"}
        refused = client.post("/", content="a")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        gate.opened.set()
        while client.get("/readyz").status_code != 200:
            pass
        assert client.get("/health").status_code == client.get("/ping").status_code == 200
        assert client.post("/", content="a").json() == "A"


def exit_thread(texts: list[str]) -> None:
    raise SystemExit


def test_dead_worker_turns_liveness_and_readiness_to_503() -> None:
    with client_for(FakeModel(exit_thread)) as client:
        answer = client.post("/", content="a")
        assert answer.status_code == 500
        assert answer.json()["error_type"] == "backend"
        for path in ("/livez", "/readyz", "/health"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert answer.json()["error_type"] == "unhealthy"
        assert client.post("/", content="b").status_code == 503


def test_root_and_info_describe_what_runs(client: TestClient) -> None:
    root = client.get("/").json()
    assert (root["name"], root["model"], root["task"]) == ("onequeue", "fake", "fill-mask")
    assert all(path.startswith("/") for path in root["links"].values())
    info = client.get("/info").json()
    assert (info["model_id"], info["state"], info["queue_depth"]) == ("fake", "ready", 0)
    assert info["limits"]["max_batch_size"] == 32
    assert info["limits"]["drain_timeout_s"] == 30
    assert "trust_remote_code" not in info["limits"]
    assert client.head("/").status_code == 200


def test_output_that_is_not_a_number_is_424(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModel, "run", lambda self, batch: [float("nan")])
    with client_for(FakeModel()) as client:
        assert client.post("/", content="a").status_code == 424


def test_a_server_below_a_path_knows_its_own_paths() -> None:
    app = create_app(Settings(overload_status=429, max_queue_size=1), lambda _: FakeModel())
    with TestClient(app, root_path="/below") as client:
        while client.get("/below/readyz").status_code != 200:
            pass
        assert client.post("/below/predict", content="a").json() == "A"
        assert client.get("/below/v1/nothing").json()["error"]["type"] == "invalid_request_error"
        counted = client.get("/below/metrics").text
    assert 'onequeue_requests_total{code="200",outcome="ok"} 1.0' in counted
    assert 'onequeue_requests_total{code="429",outcome="rejected"} 0.0' in counted


def test_bug_of_ours_is_a_clean_500(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("api.endpoints.huggingface.parse", broken)
    answer = client.post("/", content="a", headers={"x-request-id": "abc-4"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error", "error_type": "backend"}
    assert answer.headers["x-request-id"] == "abc-4"
    assert "request abc-4: internal error" in caplog.text


def test_bug_of_ours_has_the_shape_of_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("api.endpoints.openai.parse_embeddings", broken)
    model = FakeModel(info={"model_id": "fake", "task": "feature-extraction"})
    with client_for(model) as client:
        answer = client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.anyio
async def test_hang_up_is_noticed_while_queued_and_while_sending_the_body() -> None:
    gate = Gate()
    app = create_app(Settings(), load=lambda _: FakeModel(gate))
    async with app.router.lifespan_context(app):
        queue = app.state.service.queue
        while queue.state != "ready":
            await asyncio.sleep(0.001)
        for messages in ([_body(b"a")], [_body(b"a", more=True)]):
            assert await _call(app, messages) == []
            assert not queue.in_flight
        gate.opened.set()


def _body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def _call(app: Callable[..., Any], messages: list[dict[str, Any]]) -> list[Any]:
    """Send `messages`, then hang up; return what was sent in the time a real server would send."""
    sent: list[Any] = []
    incoming = iter([*messages, {"type": "http.disconnect"}])
    gone = False

    async def receive() -> dict[str, Any]:
        nonlocal gone
        message = next(incoming, {"type": "http.disconnect"})
        gone = message["type"] == "http.disconnect"
        return message

    async def send(message: dict[str, Any]) -> None:
        if not gone:
            sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "headers": []}
    await app(scope | {"query_string": b"", "state": {}, "root_path": ""}, receive, send)
    return sent


def test_json_shape_of_errors_is_ascii_safe(client: TestClient) -> None:
    answer = client.post("/", json={"inputs": "a", "pärameters": {}})
    assert "pärameters" in json.loads(answer.content)["error"]
