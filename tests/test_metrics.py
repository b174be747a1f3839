"""What /metrics says, and that what it says is true."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from config import Settings
from metrics import PREFIX, Metrics, outcome_of
from model import Cost
from server import STATUS, create_app
from tests.fakes import FakeModel, Gate
from tests.processes import server
from tests.servers import Server
from tests.threads import serving
from tests.tiny_causal import saved_causal

SLOW = "tests.apps:slow"


def samples(text: str) -> dict[str, float]:
    """Return the samples by name and labels, without the prefix: `name{a=b}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix(PREFIX)
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


def scraped(running: Server) -> dict[str, float]:
    return samples(running.get("/metrics").text)


def ended(found: Mapping[str, float]) -> dict[str, float]:
    """Return how many requests have ended, by status and outcome."""
    return {
        name.removeprefix("requests_total"): value
        for name, value in found.items()
        if name.startswith("requests_total") and value
    }


def test_each_end_of_a_request_has_its_outcome() -> None:
    outcomes = {outcome_of(code, error("x")) for error, code in STATUS.items()}
    assert outcomes == {"invalid", "failed", "rejected", "expired", "cancelled"}
    assert [outcome_of(code, None) for code in (200, 404, 500)] == ["ok", "invalid", "failed"]


def test_padding_is_the_share_of_what_was_computed_for_nothing() -> None:
    metrics = Metrics()
    metrics.count_call(Cost(forward_s=0.1, inputs=4, tokens=60, computed_tokens=80))
    metrics.count_call(Cost(prepare_s=0.1))  # a batch of several passes is prepared by itself
    found = samples(metrics.written().decode())
    assert found["padding_ratio_sum"] == 0.25
    assert found["batch_size_sum"] == 4
    assert found["inference_duration_seconds_count"] == 1
    assert found["prepare_duration_seconds_count"] == 1


def test_every_outcome_is_counted_once(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.touch()
    one = {"max_queue_size": 2, "max_batch_size": 1}
    with server(SLOW, tmp_path, batch_s=0, open=opened, **one) as running:
        early = running.post("early").status_code
        running.wait_until_ready()
        assert running.post("invalid").status_code == 422
        opened.unlink()
        assert running.get("/livez").status_code == 200
        assert running.client.put(running.url).status_code == 405
        with ThreadPoolExecutor(8) as pool:
            slow = [pool.submit(running.post, "slow")]
            running.wait_until((0, 1))
            late = pool.submit(
                running.client.post, running.url, content=b"x", headers={"x-request-timeout": "2"}
            )
            running.wait_until((1, 2))
            connection = running.connect()
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\ngone")
            running.wait_until((2, 3))
            assert running.post("refused").status_code == 503
            connection.close()
            assert late.result().status_code == 504
            opened.touch()
            assert slow[0].result().status_code == 200
        running.wait_until((0, 0))
        found = scraped(running)
        assert ended(found) == {
            **({"{code=503,outcome=rejected}": 1 + (early == 503)}),
            "{code=422,outcome=invalid}": 1,
            "{code=200,outcome=ok}": 1 + (early == 200),
            "{code=504,outcome=expired}": 1,
            "{code=499,outcome=cancelled}": 1,
        }
        assert found["rejected_total{reason=queue_full}"] == 1
        assert (found["queue_size"], found["in_flight"], found["ready"]) == (0, 0, 1)
        assert found["process_resident_memory_bytes"] > 10e6


def test_gauges_are_read_when_asked_for() -> None:
    gate = Gate()
    with TestClient(create_app(Settings(batch_wait_ms=0), lambda _: FakeModel(gate))) as client:
        while client.get("/readyz").status_code != 200:
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/", content=b"a")
            assert gate.arrived.wait(5)
            found = samples(client.get("/metrics").text)
            gate.opened.set()
            assert answer.result().status_code == 200
    assert (found["queue_size"], found["in_flight"], found["max_batch_size"]) == (0, 1, 32)
    assert found["gpu_memory_allocated_bytes"] == 7
    assert found["model_info{device=,dtype=,model_id=fake,revision=,task=fill-mask}"] == 1


def test_loading_is_told(tmp_path: Path) -> None:
    with server("tests.apps:stuck_loading", tmp_path) as running:
        assert running.post("a").status_code == 503
        found = scraped(running)
        assert found["ready"] == 0
        assert found["rejected_total{reason=loading}"] == 1


def test_bytes_of_a_real_server_pass_prometheus_own_check(tmp_path: Path) -> None:
    with serving(model_id=saved_causal(tmp_path)) as running:
        body = {"prompt": "Hello", "max_tokens": 5, "stream": True}
        assert running.client.post(running.url + "/v1/completions", json=body).status_code == 200
        assert running.post("").status_code == 400
        answer = running.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found["prompt_tokens_total"] == 5
    assert found["generated_tokens_total"] == 5
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["time_per_output_token_seconds_count"] == 1
    assert (found["running"], found["cache_tokens"], found["cache_used_tokens"]) == (0, 16384, 0)
    assert ended(found) == {"{code=200,outcome=ok}": 1, "{code=400,outcome=invalid}": 1}
    if promtool := shutil.which("promtool"):
        check = [promtool, "check", "metrics"]
        done = subprocess.run(check, input=answer.content, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_log_line_has_the_facts_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving() as running:
        headers = {"traceparent": trace, "x-request-id": "seen"}
        body = {"inputs": ["a [MASK].", "the [MASK] dog"]}
        secret = httpx.post(running.url, json=body, headers=headers).headers["x-request-id"]
        httpx.post(running.url, json={"inputs": "none"}, headers={"traceparent": "00-bad"})
    assert "the [MASK] dog" not in caplog.text
    good, bad = [vars(each)["facts"] for each in caplog.records if each.name == "telemetry"]
    assert good["request_id"] == secret == "seen"
    assert good["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert good["parent_span_id"] == "b7ad6b7169203331"
    assert (good["outcome"], good["status"], good["inputs"]) == ("ok", 200, 2)
    assert good["input_tokens"] > 6
    assert 1 <= good["batch_size"] <= 2
    assert 0 < good["inference_ms"] < good["total_ms"]
    assert {"queue_ms", "prepare_ms", "finish_ms"} <= good.keys()
    assert bad["outcome"] == "invalid"
    assert "trace_id" not in bad
    assert "No mask_token" in bad["cause"]
