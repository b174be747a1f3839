"""What deploy/ says is so: its files are valid, and agree with the server and with each other."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import protocol
from api.about import VERSION
from config import Settings, load_settings
from lifecycle import FLUSH_S
from metrics import GAUGES, Metrics
from server import create_app
from tests.dockerfile import only, pairs
from tests.nginx import CONFIGURATION
from tests.processes import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
TO_END_S = 5  # for the interpreter to end after the last answer


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def merged(patch: Any, onto: Any) -> Any:
    """Return what kustomize makes of a patch: lists go by the names of their items."""
    if isinstance(patch, dict) and isinstance(onto, dict):
        return onto | {key: merged(value, onto.get(key)) for key, value in patch.items()}
    if isinstance(patch, list) and isinstance(onto, list):
        by_name = {item["name"]: item for item in onto}
        names = [item["name"] for item in patch]
        assert set(names) <= set(by_name)
        return [merged(item, by_name[item["name"]]) for item in patch]
    return patch


KUSTOMIZATION = read(BASE / "kustomization.yaml")
OBJECTS = {
    each["kind"]: each for each in (read(BASE / name) for name in KUSTOMIZATION["resources"])
}
GPU = merged(read(KUBERNETES / "gpu" / "deployment.yaml"), copy.deepcopy(OBJECTS["Deployment"]))
POD = OBJECTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
COMPOSE = read(DEPLOY / "compose.yaml")
ROUTES = {getattr(route, "path", None) for route in create_app(Settings()).routes}
ENVIRONMENT = {name.upper() for name in Settings.model_fields} | {"HF_TOKEN"}


# Kubernetes


@pytest.mark.parametrize("version", ["1.30", "1.37"])  # the first with preStop.sleep, the newest
@pytest.mark.parametrize("name", [*OBJECTS, "GPU"])
def test_objects_are_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS.get(name, GPU), version, strict=True)


def test_a_misspelt_key_is_not_valid() -> None:
    wrong = merged({"spec": {"template": {"spec": {"containerz": []}}}}, OBJECTS["Deployment"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_kustomization_has_every_file() -> None:
    (settings,) = KUSTOMIZATION["configMapGenerator"]
    used = {"kustomization.yaml", *KUSTOMIZATION["resources"], *settings["files"]}
    assert used == {path.name for path in BASE.iterdir()}
    assert len(OBJECTS) == len(KUSTOMIZATION["resources"])
    (volume,) = [
        each["configMap"]["name"] for each in POD["spec"]["volumes"] if "configMap" in each
    ]
    assert volume == settings["name"]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of the pods."""
    monkeypatch.setenv("CONFIG_FILE", str(BASE / "settings.yaml"))
    return load_settings()


def test_settings_file_is_where_the_pod_looks_for_it(settings: Settings) -> None:
    assert set(read(BASE / "settings.yaml")) <= settings.model_fields_set
    paths = [each["value"] for each in CONTAINER["env"] if each["name"] == "CONFIG_FILE"]
    (folder,) = [at["mountPath"] for at in CONTAINER["volumeMounts"] if at["name"] == "settings"]
    assert paths == [f"{folder}/settings.yaml"]


def test_grace_period_has_room_for_pause_and_drain(settings: Settings) -> None:
    pause_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = pause_s + settings.drain_timeout_s + FLUSH_S + TO_END_S
    assert pause_s >= 5
    assert needed_s <= POD["spec"]["terminationGracePeriodSeconds"]
    assert settings.request_timeout_s <= settings.drain_timeout_s


def test_probes_ask_the_right_paths() -> None:
    asked = {
        name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    paths = {name: get["path"] for name, get in asked.items()}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert {*paths.values(), POD["metadata"]["annotations"]["prometheus.io/path"]} <= ROUTES
    assert {get["port"] for get in asked.values()} == {"http"}


def test_ports_agree() -> None:
    (port,) = CONTAINER["ports"]
    assert port["name"] == OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    number = str(port["containerPort"])
    assert [number] == only("EXPOSE").args
    assert number == pairs("ENV")["UVICORN_PORT"]
    assert number == POD["metadata"]["annotations"]["prometheus.io/port"]
    assert COMPOSE["services"]["server"]["ports"] == [f"127.0.0.1:{number}:{number}"]
    (job,) = read(DEPLOY / "prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{number}"]}]


def test_autoscaler_asks_for_what_there_is(settings: Settings) -> None:
    metrics = Metrics()
    metrics.watch(lambda: dict.fromkeys(GAUGES, 0), dict)
    families = text_string_to_metric_families(metrics.written().decode())
    shown = {sample.name for family in families for sample in family.samples}
    rules = read(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} <= shown
    targets = {
        each["pods"]["metric"]["name"]: float(each["pods"]["target"]["averageValue"])
        for each in OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert list(targets) == [rule["name"]["as"] for rule in rules]
    assert targets["onequeue_queue_size"] < settings.max_queue_size


def test_objects_find_each_other() -> None:
    spec = {kind: each["spec"] for kind, each in OBJECTS.items()}
    labels = POD["metadata"]["labels"]
    assert labels == spec["Service"]["selector"]
    for kind, name in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        assert spec[kind][name] == {"matchLabels": labels}
    target = spec["HorizontalPodAutoscaler"]["scaleTargetRef"]
    assert target["name"] == OBJECTS["Deployment"]["metadata"]["name"] == GPU["metadata"]["name"]
    assert "replicas" not in spec["Deployment"]


def test_pod_may_do_nothing_but_serve() -> None:
    pod, alone = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert pod["runAsNonRoot"]
    assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == only("USER").args[0]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert alone == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {each["mountPath"] for each in CONTAINER["volumeMounts"] if not each.get("readOnly")}
    assert mounts == {pairs("ENV")["HF_HOME"], "/tmp"}


@pytest.mark.parametrize("deployment", [OBJECTS["Deployment"], GPU], ids=["CPU", "GPU"])
def test_pod_gets_what_it_may_use(deployment: Mapping[str, Any]) -> None:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    asked, allowed = container["resources"]["requests"], container["resources"]["limits"]
    assert asked == {name: allowed[name] for name in ("cpu", "memory")}


def test_environment_holds_settings_and_keys_are_secret() -> None:
    names = {each["name"]: "valueFrom" in each for each in CONTAINER["env"]}
    assert set(names) <= ENVIRONMENT
    assert all(secret for name, secret in names.items() if re.search("KEY|TOKEN", name))


# Compose


def test_compose_sets_what_there_is_and_lets_the_server_drain() -> None:
    server = COMPOSE["services"]["server"]
    assert set(server["environment"]) <= ENVIRONMENT
    grace_s = float(server["stop_grace_period"].removesuffix("s"))
    assert Settings().drain_timeout_s + FLUSH_S + TO_END_S <= grace_s
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()


def test_compose_mounts_what_there_is() -> None:
    mounts = [each.split(":") for one in COMPOSE["services"].values() for each in one["volumes"]]
    files = {source: target for source, target, *_ in mounts if source.startswith(".")}
    named = {source for source, *_ in mounts if not source.startswith(".")}
    assert named == set(COMPOSE["volumes"])
    assert all((DEPLOY / source).exists() for source in files)
    assert [files["./alerts.yaml"]] == read(DEPLOY / "prometheus.yaml")["rule_files"]
    (provider,) = read(DEPLOY / "grafana-provisioning/dashboards/onequeue.yaml")["providers"]
    assert Path(files["./grafana.json"]).parent == Path(provider["options"]["path"])


def test_versions_agree() -> None:
    assert pairs("LABEL")["org.opencontainers.image.version"] == VERSION
    assert COMPOSE["services"]["server"]["image"] == f"onequeue:{VERSION}"
    (image,) = KUSTOMIZATION["images"]
    (gpu,) = read(KUBERNETES / "gpu" / "kustomization.yaml")["images"]
    assert image["name"] == gpu["name"] == CONTAINER["image"]
    assert (image["newTag"], gpu["newTag"]) == (VERSION, f"{VERSION}-cuda")


# nginx and systemd


def seconds(name: str) -> list[float]:
    units = {"s": 1.0, "ms": 0.001}
    found = re.findall(rf"^\s*{name} (\d+)(m?s);", CONFIGURATION.read_text(), re.MULTILINE)
    return [int(number) * units[unit] for number, unit in found]


def test_times_agree_with_those_of_the_servers() -> None:
    settings = Settings.model_construct()
    assert min(seconds("proxy_read_timeout")) > settings.request_timeout_s
    assert max(seconds("keepalive_timeout")) < protocol.LAST_CALL_S
    unit = (ROOT / "deploy" / "onequeue@.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop
    assert int(stop[1]) > settings.drain_timeout_s
    assert f"KillSignal={signal.SIGTERM.name}" in unit
