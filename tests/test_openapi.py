"""The description of the server is true, and nothing that fits or does not fit it breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.openapi import Served, document
from api.tasks import FORMATS
from tests.processes import Process
from tests.servers import Server
from tests.threads import serving
from tests.tiny_causal import saved_causal

FUZZ_S = int(os.environ.get("FUZZ_S", "8"))
SCHEMATHESIS = (
    *(sys.executable, "-m", "schemathesis.cli", "run", "--phases=examples,coverage,fuzzing"),
    *("--max-examples=30", "--warnings=off", "--no-color", f"--max-time={FUZZ_S}"),
    "--exclude-checks=positive_data_acceptance",  # a schema cannot say that a text needs a mask
)


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = saved_causal(tmp_path_factory.mktemp("model"), max_position_embeddings=64)
    with serving(model_id=folder) as started:
        yield started


def test_document_lists_what_the_task_serves_and_no_more(bundled: Process) -> None:
    api = bundled.get("/openapi.json").json()
    assert api["openapi"] == "3.1.0"
    assert set(api["paths"]) == {
        *("/", "/predict", "/invocations", "/livez", "/readyz", "/info", "/v1/models")
    }
    content = api["paths"]["/"]["post"]["requestBody"]["content"]
    examples = content["application/json"]["examples"]
    assert examples
    for example in examples.values():
        assert bundled.client.post(bundled.url, json=example["value"]).status_code == 200
    assert bundled.get("/docs").headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("task", FORMATS)
def test_every_task_has_a_document_with_its_examples(task: str) -> None:
    api = document(Served("1", task, FORMATS[task], "<mask>", chats=True, keyed=True))
    content = api["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]
    assert content["examples"].keys() == FORMATS[task].examples.keys()
    assert "[MASK]" not in json.dumps(api)
    assert ("<mask>" in json.dumps(api)) is (task == "fill-mask")
    assert "security" in api["paths"]["/"]["post"]
    assert "security" not in api["paths"]["/livez"]["get"]
    assert ("/v1/embeddings" in api["paths"]) is (task == "feature-extraction")
    assert ("/v1/chat/completions" in api["paths"]) is (task == "text-generation")
    for example in FORMATS[task].examples.values():
        FORMATS[task].body.model_validate(example)


def test_while_loading_nothing_is_promised() -> None:
    api = document(Served("1", None, None, None, chats=False, keyed=False))
    assert "post" not in api["paths"]["/"]


@pytest.mark.parametrize("which", ["bundled", "generating"])
def test_schemathesis_finds_no_error_and_no_untruth(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    started: Server = request.getfixturevalue(which)
    # What it covers is not ours, and measured it would upset the report.
    others = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    run = subprocess.run(
        [*SCHEMATHESIS, f"{started.url}/openapi.json"],
        cwd=tmp_path,
        env=others,
        capture_output=True,
        text=True,
        check=False,
        timeout=FUZZ_S + 60,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert started.get("/readyz").status_code == 200
    started.wait_until((0, 0))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["top_k", "targets", "tokenizer_kwargs", "truncation", "max_length", "function_to_apply"]
)
TEXTS = st.text(max_size=60) | st.builds("a {} [MASK] {}".format, st.text(max_size=20), st.text())
BODIES = st.fixed_dictionaries(
    {"inputs": TEXTS | st.lists(TEXTS, max_size=5) | VALUES},
    optional={
        "parameters": st.dictionaries(NAMES | st.text(max_size=8), VALUES, max_size=4) | VALUES,
        "options": VALUES,
        "instances": VALUES,
    },
)
TYPES = st.sampled_from(
    ["application/json", "text/plain", "application/x-www-form-urlencoded", "image/png", ""]
) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
RAW = st.binary(max_size=200) | TEXTS.map(lambda text: text.encode("utf-8", "replace"))
JSON = BODIES.map(lambda body: json.dumps(body).encode())
REQUESTS = st.tuples(JSON, st.just("application/json")) | st.tuples(RAW, TYPES)


@given(request=REQUESTS, path=st.sampled_from(["/", "/predict", "/v1/embeddings", "/v1/models"]))
def test_no_body_breaks_the_server(bundled: Process, request: Any, path: str) -> None:
    body, content_type = request
    headers = {"content-type": content_type.strip()}
    response = bundled.client.post(bundled.url + path, content=body, headers=headers)
    assert response.status_code in {200, 400, 404, 405, 413, 415, 422}, (request, response.text)
    response.json()


def test_server_is_well_after_all_that(bundled: Process) -> None:
    assert httpx.get(f"{bundled.url}/livez").status_code == 200
    assert bundled.post("test [MASK]").status_code == 200
    assert bundled.gauges() == (0, 0)
    assert "Traceback" not in bundled.log
