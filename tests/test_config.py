from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import SecretStr, ValidationError

import cpus
from api.tasks import FORMATS
from config import TASK_ALIASES, ConfigurationError, Settings, Task, load_settings
from cpus import _cgroup_quota, available_cpus

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(f"HF_{name.upper()}", raising=False)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_need_no_environment() -> None:
    settings = load_settings()
    assert settings.model_id == "models/tiny-fill-mask"
    assert settings.max_batch_size == 32
    assert settings.batch_wait_ms == 1
    assert settings.num_threads == available_cpus()


def test_environment_wins_over_files_and_later_files_over_earlier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = write(tmp_path / "a.yaml", "max_batch_size: 4\nmax_queue_size: 5\nmodel_id: a\n")
    second = write(tmp_path / "b.yaml", "max_queue_size: 6\n")
    monkeypatch.setenv("CONFIG_FILE", f"{first}, {second}")
    monkeypatch.setenv("MAX_BATCH_SIZE", "7")
    monkeypatch.setenv("HF_MODEL_ID", "from-alias")
    settings = load_settings()
    assert (settings.max_batch_size, settings.max_queue_size) == (7, 6)
    assert settings.model_id == "from-alias"


def test_own_name_wins_over_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_ID", "own")
    monkeypatch.setenv("HF_MODEL_ID", "alias")
    assert load_settings().model_id == "own"


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_BATCH_SIZE", "")
    assert load_settings().max_batch_size == 32


def test_empty_api_key_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "")
    with pytest.raises(ConfigurationError, match="api_key"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_BATCH_SIZE", "0"),
        ("MAX_BATCH_SIZE", "many"),
        ("BATCH_WAIT_MS", "-1"),
        ("REQUEST_TIMEOUT_S", "nan"),
        ("REQUEST_TIMEOUT_S", "0"),
        ("DEVICE", "toaster"),
        ("DTYPE", "float8"),
        ("TASK", "mind-reading"),
        ("OVERLOAD_STATUS", "418"),
        ("TRUST_REMOTE_CODE", "perhaps"),
        ("LOG_FORMAT", "xml"),
        ("NUM_THREADS", "-2"),
    ],
)
def test_value_out_of_range_is_refused_with_key_and_value_on_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as refusal:
        load_settings()
    assert re.match(rf"{name.lower()}='?{value}'?: ", str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_sise: 4", "max_batch_sise=4: there is no such setting"),
        ("- a list", "not `setting: value` lines but a list"),
        ("key: [unclosed", "while parsing a flow sequence"),
        ("max_batch_size: lots", "max_batch_size='lots'"),
        ("api_key: 12345", "api_key=***: "),
        ("config_file: other.yaml", "a file cannot name further files"),
        ("- api_key: hunter2", "but a list"),
        ("model_id: 2024-02-30", "day is out of range"),
        ("a: !!bool x", "CONFIG_FILE"),
        ("overload_status: [1]", "overload_status=[1]"),
        ('api_key: ""', "visible ASCII"),
        ("api_key: two words", "visible ASCII"),
        ("1: 2", "1=2: there is no such setting"),
    ],
)
def test_bad_file_is_refused_with_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    monkeypatch.setenv("CONFIG_FILE", write(tmp_path / "bad.yaml", text))
    with pytest.raises(ConfigurationError) as refusal:
        load_settings()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_json_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KWARGS", "{bad")
    with pytest.raises(ConfigurationError, match=r"model_kwargs.*: Expecting property name"):
        load_settings()


def test_missing_file_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_FILE", "nowhere.yaml")
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        load_settings()


@pytest.mark.parametrize("name", ["dev", "prod"])
def test_example_files_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    files = f"{ROOT}/configs/base.yaml,{ROOT}/configs/{name}.yaml"
    monkeypatch.setenv("CONFIG_FILE", files)
    assert load_settings().log_format == ("json" if name == "prod" else "text")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "a,,b"),
        ("admin_key", "with space"),
        ("cors_origins", "example.org"),
        ("cors_origins", "https://a.example/path"),
        ("memory_check_batches", 0),
    ],
)
def test_values_of_operators_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


def test_keys_are_not_shown() -> None:
    assert "hunter2" not in repr(Settings(api_key=SecretStr("hunter2")))


def test_cgroup_quota_is_read_in_both_versions(tmp_path: Path) -> None:
    assert _cgroup_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "150000\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert _cgroup_quota(tmp_path) == 1.5
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1\n")
    assert _cgroup_quota(tmp_path) is None
    write(tmp_path / "cpu.max", "200000 100000\n")
    assert _cgroup_quota(tmp_path) == 2.0
    write(tmp_path / "cpu.max", "max 100000\n")
    assert _cgroup_quota(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux tells")
@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 4), (0.2, 1), (1.4, 1), (2.0, 2), (2.6, 3), (8, 4)]
)
def test_cpus_are_those_of_the_affinity_within_the_quota(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2, 3})
    monkeypatch.setattr(cpus, "_cgroup_quota", lambda: quota)
    assert available_cpus() == expected


def test_every_task_that_can_be_named_has_a_wire_format() -> None:
    assert set(get_args(Task)) == set(FORMATS)
    assert set(TASK_ALIASES.values()) <= set(FORMATS)
