"""The dashboard and the alerts: all that they ask, a real Prometheus can answer of real servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from metrics import GAUGES, PREFIX
from server import STATUS
from tests.processes import ROOT
from tests.servers import Server, free_port
from tests.threads import serving
from tests.tiny_causal import saved_causal

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
(GROUP,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
ALERTS = {rule["alert"]: rule["expr"] for rule in GROUP["rules"]}
ALERT_TESTS = yaml.safe_load((DEPLOY / "alerts_test.yaml").read_text())["tests"]
FIRING = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
GPU = {PREFIX + name for name in GAUGES if name.startswith("gpu_")}

programs = shutil.which("prometheus") and shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not programs, reason="no Prometheus here")


@contextmanager
def prometheus(folder: Path, servers: Sequence[Server]) -> Iterator[httpx.Client]:
    """Run Prometheus as the docs would have it; end it at the end."""
    section = (ROOT / "docs/operating.md").read_text().partition("## Dashboard and alerts\n")[2]
    config = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    config["global"]["scrape_timeout"] = "200ms"
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{each.port}" for each in servers]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--web.listen-address=127.0.0.1:{port}"]
    command += ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            _wait_until_ready(client)
            yield client
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(httpx.ConnectError):
            if client.get("/-/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("Prometheus does not get ready")


@dataclass(frozen=True)
class Watched:
    """Two servers and the Prometheus that scrapes them."""

    masks: Server
    texts: Server
    prometheus: httpx.Client

    def use(self) -> None:
        """Send requests that end in each way that a client can bring about."""
        masks, texts = self.masks, self.texts
        with ThreadPoolExecutor(16) as pool:
            statuses = {each.status_code for each in pool.map(masks.post, ["a [MASK]."] * 32)}
        assert {200} <= statuses <= {200, 503}
        assert masks.post("no mask").status_code == 422
        late = {"x-request-timeout": "1e-9"}
        assert masks.client.post(masks.url, content=b"[MASK]", headers=late).status_code == 504
        key, missing = {"authorization": "Bearer k"}, {"model_id": "/nowhere"}
        reload = masks.client.post(masks.url + "/admin/reload", json=missing, headers=key)
        assert reload.status_code == 422
        body = {"prompt": "Hello", "max_tokens": 5}
        assert texts.client.post(texts.url + "/v1/completions", json=body).status_code == 200

    def use_until(self, what_lacks: Callable[[], object]) -> None:
        """Go on until nothing lacks."""
        deadline = time.monotonic() + 20
        while lacking := what_lacks():
            assert time.monotonic() < deadline, lacking
            self.use()

    def get(self, path: str, **parameters: str) -> Any:
        """Return what the API of Prometheus answers."""
        answer = self.prometheus.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def ask(self, expression: str) -> list[Any]:
        """Return the samples that an expression of the dashboard or of an alert gives now."""
        instances = f"127.0.0.1:{self.masks.port}|127.0.0.1:{self.texts.port}"
        filled = expression.replace("$instance", instances).replace("$__rate_interval", "1m")
        found: list[Any] = self.get("query", query=filled)["result"]
        return found

    def series(self) -> Mapping[str, list[Mapping[str, str]]]:
        """Return the labels of all that the servers tell, by its name, with those of the target."""
        found: dict[str, list[Mapping[str, str]]] = {}
        for up in self.ask("up"):
            target = {label: up["metric"][label] for label in ("job", "instance")}
            found.setdefault("up", []).append(target)
            text = self.masks.client.get(f"http://{target['instance']}/metrics").text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append(target | sample.labels)
            found |= {name: [target] for name in GPU}  # there is none here
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    model = saved_causal(tmp_path_factory.mktemp("model"))
    with (
        serving(max_queue_size=1, admin_key="k") as masks,
        serving(model_id=model) as texts,
        prometheus(tmp_path_factory.mktemp("watch"), (masks, texts)) as client,
    ):
        yield Watched(masks, texts, client)


def shows(samples: list[Any], target: Mapping[str, str]) -> bool:
    """Tell whether there is a number in `samples`; each must have the labels of the legend."""
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
    assert all(wanted <= sample["metric"].keys() for sample in samples), (target, samples)
    return any(sample["value"][1] != "NaN" for sample in samples)


@needs_prometheus
def test_every_panel_shows_something(watched: Watched) -> None:
    shown = [target for target in TARGETS if not any(name in target["expr"] for name in GPU)]
    assert len(shown) == len(TARGETS) - len(GPU) > 30
    outcomes = {"ok", "invalid", "rejected", "expired"}

    def lacking() -> list[str]:
        counted = watched.ask("onequeue_requests_total")
        return [
            *(outcomes - {each["metric"]["outcome"] for each in counted}),
            *(each["expr"] for each in shown if not shows(watched.ask(each["expr"]), each)),
        ]

    watched.use_until(lacking)


@needs_prometheus
def test_every_expression_runs(watched: Watched) -> None:
    for expression in [*ALERTS.values(), *(target["expr"] for target in TARGETS)]:
        watched.ask(expression)
    with pytest.raises(AssertionError, match="parse error"):
        watched.ask(TARGETS[0]["expr"] + ")")


@needs_prometheus
def test_one_can_choose_among_the_servers(watched: Watched) -> None:
    query = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES["instance"]["query"])
    assert query is not None
    values = watched.get(f"label/{query[2]}/values", **{"match[]": query[1]})
    assert len(values) == 2


@needs_prometheus
def test_alerts_are_evaluated_and_one_fires(watched: Watched) -> None:
    def lacking() -> object:
        (group,) = watched.get("rules")["groups"]
        assert {rule["name"] for rule in group["rules"]} == ALERTS.keys()
        assert not any(rule.get("lastError") for rule in group["rules"])
        unwell = [rule["name"] for rule in group["rules"] if rule["health"] != "ok"]
        fired = {each["metric"]["alertname"] for each in watched.ask(FIRING)}
        return unwell or fired ^ {"OnequeueReloadFailed"}

    watched.use_until(lacking)


def check_names(expression: str, series: Mapping[str, list[Mapping[str, str]]]) -> None:
    """Check that the metrics, the labels and the values in an expression are among `series`."""
    names = set(re.findall(r"\b(?:onequeue|process)_\w+", expression))
    assert names
    assert names <= series.keys()
    labels = {label for name in names for each in series[name] for label in each}
    for listed in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", expression):
        assert labels.issuperset(listed.split(", "))
    ends = {error.outcome for error in STATUS}  # not all can be brought about
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label, sign, value in re.findall(r'(\w+)([=~!]+)"([^"]*)"', matchers):
            values = {each[label] for each in series[name]}
            assert sign == "=~" or value in values | (ends if label == "outcome" else set())


@needs_prometheus
def test_every_name_and_label_is_there(watched: Watched) -> None:
    watched.use_until(lambda: "onequeue_rejected_total" not in watched.series())
    series = watched.series()
    for expression in [*ALERTS.values(), *(target["expr"] for target in TARGETS)]:
        check_names(expression, series)
    for wrong in (
        "onequeue_requests",
        'onequeue_ready{x="y"}',
        'onequeue_reloads_total{outcome="fails"}',
        "sum by (x) (onequeue_ready)",
    ):
        with pytest.raises((AssertionError, KeyError)):
            check_names(wrong, series)


@needs_prometheus
def test_alerts_are_tested_with_series_as_there_are(watched: Watched) -> None:
    watched.use_until(lambda: "onequeue_rejected_total" not in watched.series())
    series = watched.series()
    for text in {each["series"] for test in ALERT_TESTS for each in test["input_series"]}:
        name, _, labels = text.partition("{")
        assert set(re.findall(r'(\w+)="', labels)) in [set(each) for each in series[name]], text


def test_each_alert_is_tested_both_ways() -> None:
    fired: list[str] = []
    for test in ALERT_TESTS:
        assert any('instance="good"' in each["series"] for each in test["input_series"])
        assert {each["expr"] for each in test["promql_expr_test"]} == {FIRING}
        assert [] in [each["exp_samples"] for each in test["promql_expr_test"]]
        samples = [each for check in test["promql_expr_test"] for each in check["exp_samples"]]
        for sample in samples:
            fired += re.findall(r'^\{alertname="(\w+)", instance="bad', sample["labels"])
    assert set(fired) == ALERTS.keys()


@needs_prometheus
def test_alerts_pass_promtool() -> None:
    for command, file in (("check", "alerts.yaml"), ("test", "alerts_test.yaml")):
        done = subprocess.run(
            ["promtool", command, "rules", file], cwd=DEPLOY, capture_output=True, check=False
        )
        assert done.returncode == 0, done
        assert b"SUCCESS" in done.stdout


def test_every_alert_says_what_to_do() -> None:
    assert len(GROUP["rules"]) == len(ALERTS) == 10
    for rule in GROUP["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 80


def test_dashboard_is_tidy() -> None:
    assert VARIABLES["DS_PROMETHEUS"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    assert all(each["datasource"] == source for each in [*PANELS, VARIABLES["instance"]])
    assert not {"id", "uid"} & DASHBOARD.keys()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert len(panel["title"]) < 25
        assert re.fullmatch(r"[A-Z].{10,110}\.", panel["description"])
        assert panel["type"] != "timeseries" or panel["fieldConfig"]["defaults"]["unit"]
        assert all("$instance" in target["expr"] for target in panel["targets"])
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells)) == 24 * (max(y for _, y in cells) + 1)
