"""Tasks on text: in one batch, packed, the answers of the untouched pipeline one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from config import Settings
from errors import LoadError, ModelFailed, Rejected
from inference.embedding import EmbeddingConfig, read_config
from inference.loading import load
from model import Model
from tests.models import answers, assert_same, loaded, saved_model

TEXTS = [
    "A small dog runs in the park near Berlin.",
    "hello",
    "Ada Lovelace was born in London, and she likes tea and the theatre.",
    "long words and short words " * 30,
    "hello",
]
ENTITIES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
INFERENCE = {0: "contradiction", 1: "neutral", 2: "entailment"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    root = tmp_path_factory.mktemp("models")
    classifier = AutoModelForSequenceClassification
    return {
        "text-classification": saved_model(root / "classes", classifier, num_labels=3),
        "zero-shot-classification": saved_model(root / "nli", classifier, id2label=INFERENCE),
        "token-classification": saved_model(
            root / "entities", AutoModelForTokenClassification, id2label=ENTITIES
        ),
        "feature-extraction": saved_model(root / "vectors", AutoModel),
    }


@pytest.fixture(scope="module")
def models(folders: Mapping[str, str]) -> Mapping[str, Model]:
    return {
        task: loaded(model_id=folder, task=task, device="cpu") for task, folder in folders.items()
    }


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("text-classification", {}),
        ("text-classification", {"top_k": 2}),
        ("text-classification", {"top_k": None, "function_to_apply": "sigmoid"}),
        ("token-classification", {}),
        ("token-classification", {"aggregation_strategy": "simple", "ignore_labels": []}),
        ("token-classification", {"aggregation_strategy": "max"}),
        ("token-classification", {"aggregation_strategy": "first", "stride": 20}),
        ("zero-shot-classification", {"candidate_labels": ["sport", "tea", "dogs"]}),
        (
            "zero-shot-classification",
            {"candidate_labels": "a,b", "multi_label": True, "hypothesis_template": "It is {}!"},
        ),
    ],
)
def test_batch_answers_as_the_untouched_pipeline_does_one_by_one(
    task: str, parameters: dict[str, Any], folders: Mapping[str, str], models: Mapping[str, Model]
) -> None:
    untouched: Any = pipeline(task, model=folders[task], device="cpu", dtype="float32")  # type: ignore[call-overload, unused-ignore]
    model = models[task]
    assert "packed" in model.info["batching"]["path"]
    actual = answers(model, *((text, parameters) for text in TEXTS))
    assert_same(actual, [untouched(text, **parameters) for text in TEXTS])
    json.dumps(actual)


def test_mixed_parameters_in_one_batch_stay_apart(models: Mapping[str, Model]) -> None:
    inputs = [
        ("hello", {}),
        ("hello", {"top_k": 3}),
        ({"text": "hello", "text_pair": "world"}, {}),
        ("word " * 300, {"truncation": True, "max_length": 20}),
        ("word " * 300, {}),
    ]
    together = answers(models["text-classification"], *inputs)
    assert [len(answer) for answer in together[:4]] == [1, 3, 1, 1]
    assert "set parameters.truncation to true" in str(together[4])
    alone = [answers(models["text-classification"], each)[0] for each in inputs[:4]]
    assert_same(together[:4], alone)


def test_token_vectors_are_those_of_the_pipeline_and_never_padded(
    folders: Mapping[str, str], models: Mapping[str, Model]
) -> None:
    untouched = pipeline("feature-extraction", model=folders["feature-extraction"], device="cpu")
    texts = TEXTS[:3]
    actual = answers(models["feature-extraction"], *((text, {"pooling": "none"}) for text in texts))
    assert_same(actual, [untouched(text)[0] for text in texts])


def test_vectors_without_a_config_are_means(models: Mapping[str, Model]) -> None:
    model = models["feature-extraction"]
    pooled, tokens, short = answers(
        model,
        ("hello world", {}),
        ("hello world", {"pooling": "none"}),
        ("hello world", {"dimensions": 4, "normalize": True}),
    )
    assert_same(pooled, [sum(column) / len(tokens) for column in zip(*tokens, strict=True)])
    others = [("hello world", {"pooling": name}) for name in ("cls", "lasttoken", "max")]
    first, last, largest = answers(model, *others)
    assert_same([first, last], [tokens[0], tokens[-1]])
    assert_same(largest, [max(column) for column in zip(*tokens, strict=True)])
    length = sum(value * value for value in pooled[:4]) ** 0.5
    assert_same(short, [value / length for value in pooled[:4]])


@pytest.mark.parametrize(
    ("task", "value", "parameters", "message"),
    [
        ("feature-extraction", "a", {"dimensions": 10_000}, "parameters.dimensions: the model has"),
        ("feature-extraction", "a", {"prompt_name": "q"}, "parameters.prompt_name: this model"),
        ("feature-extraction", "word " * 300, {}, "set parameters.truncate to true"),
        ("token-classification", "a", {"stride": 400}, "stride"),
        (
            "token-classification",
            "a",
            {"aggregation_strategy": "first", "stride": 200},
            "overlap by half",
        ),
        ("text-classification", "a", {"max_length": 1000}, "max_length must be at most 256"),
        ("zero-shot-classification", "a", {"candidate_labels": ","}, "at least one label"),
        (
            "zero-shot-classification",
            "word " * 300,
            {"candidate_labels": [f"label {number}" for number in range(99)]},
            "tokens in all",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    task: str, value: str, parameters: dict[str, Any], message: str, models: Mapping[str, Model]
) -> None:
    refusal, neighbour = answers(
        models[task],
        (value, parameters),
        ("b", {"candidate_labels": ["x", "y"]} if "zero" in task else {}),
    )
    assert isinstance(refusal, Rejected)
    assert message in str(refusal)
    assert not isinstance(neighbour, Exception)


def test_number_that_is_not_finite_fails_its_input_alone(folders: Mapping[str, str]) -> None:
    model: Any = load(Settings(model_id=folders["feature-extraction"], device="cpu"))
    words = model._task.pipeline.model.embeddings.position_embeddings.weight
    words[40:] = float("nan")
    first, poisoned = answers(model, ("hello", {}), ("word " * 60, {}))
    assert isinstance(poisoned, ModelFailed)
    assert isinstance(first, list)


def config_of(folder: Path, **files: Any) -> EmbeddingConfig:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(files.get("pooling", {})))

    def path(name: str) -> str | None:
        return str(folder / name) if (folder / name).exists() else None

    return read_config(path)


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "3_Dense"}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([], {}, EmbeddingConfig()),
        (MODULES, {"pooling_mode_cls_token": True}, EmbeddingConfig("cls")),
        (MODULES, {"pooling_mode_mean_tokens": True}, EmbeddingConfig("mean")),
        (MODULES, {"pooling_mode": "lasttoken"}, EmbeddingConfig("lasttoken")),
        ([*MODULES, NORMALIZE], {}, EmbeddingConfig("mean", normalize=True)),
    ],
)
def test_config_of_sentence_transformers_is_followed(
    modules: Any, pooling: Any, expected: EmbeddingConfig, tmp_path: Path
) -> None:
    assert config_of(tmp_path, modules=modules, pooling=pooling) == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ([*MODULES, DENSE], {}, "a module that is not served: Dense"),
        (MODULES, {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (
            MODULES,
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "not served: ",
        ),
    ],
)
def test_embeddings_that_are_made_otherwise_are_not_served(
    modules: Any, pooling: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, modules=modules, pooling=pooling)


def test_prompts_and_limits_of_the_model_are_kept(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "": ""}, "default_prompt_name": "query"}
    limits = {"max_seq_length": 64, "do_lower_case": True}
    folder = Path(saved_model(tmp_path / "model", AutoModel))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    model = loaded(model_id=str(folder), device="cpu")
    assert model.info["max_input_tokens"] == 64
    prompted, plain, upper = answers(
        model, ("a dog", {}), ("query: a dog", {"prompt_name": ""}), ("A DOG", {})
    )
    assert_same(prompted, plain)
    assert_same(prompted, upper)


def test_task_without_its_head_is_refused(folders: Mapping[str, str]) -> None:
    with pytest.raises(LoadError, match="the weights lack classifier"):
        load(Settings(model_id=folders["feature-extraction"], task="token-classification"))
