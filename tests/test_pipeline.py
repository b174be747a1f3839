"""The model side, on the bundled model and on tiny random ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    pipeline,
)

from benchmarks.models import sentences
from config import Settings
from errors import LoadError, ModelFailed, Rejected
from inference import fill_mask
from inference.loading import load
from model import Model
from tests.models import BUNDLED, answers, assert_same, loaded
from tests.tiny import word_tokenizer

TEXTS = [
    "Paris is the [MASK] of France.",
    "test [MASK]",
    "[MASK]",
    "The [MASK] chased the [MASK] up a tree.",
    "A very long sentence " + "that goes on and on " * 30 + "until it [MASK].",
    "naïve café [MASK] ☕ 日本",
]


@pytest.fixture(scope="module")
def model() -> Model:
    return loaded(model_id=BUNDLED, device="cpu")


@pytest.fixture(scope="module")
def untouched() -> Any:
    return pipeline("fill-mask", model=BUNDLED, device="cpu", dtype="float32")


@pytest.mark.parametrize("text", TEXTS)
def test_answer_is_that_of_the_untouched_pipeline(model: Model, untouched: Any, text: str) -> None:
    (answer,) = answers(model, (text, {}))
    assert_same(answer, untouched(text))


def test_parameters_of_one_input_do_not_reach_another(model: Model, untouched: Any) -> None:
    long = "word " * 400 + "[MASK]"
    wishes: list[tuple[str, dict[str, Any]]] = [
        (TEXTS[0], {"top_k": 1}),
        (TEXTS[0], {}),
        (TEXTS[0], {"targets": ["city", "king"]}),
        (TEXTS[3], {"targets": "cat", "top_k": 3}),
        ("[MASK] " + long, {"tokenizer_kwargs": {"truncation": True}, "top_k": 2}),
        (TEXTS[1], {"top_k": 7}),
    ]
    for answer, (text, parameters) in zip(answers(model, *wishes), wishes, strict=True):
        assert_same(answer, untouched(text, **parameters))


def test_invalid_inputs_are_refused_and_their_mates_are_not(model: Model, untouched: Any) -> None:
    first, no_mask, too_long, last = answers(
        model, (TEXTS[0], {}), ("no mask", {}), ("word " * 300 + "[MASK]", {}), (TEXTS[1], {})
    )
    assert_same([first, last], [untouched(TEXTS[0]), untouched(TEXTS[1])])
    assert str(no_mask) == "No mask_token ([MASK]) found on the input"
    assert str(too_long).startswith("the input has 303 tokens, and 256 fit")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_k": 1_000_000}, "parameters.top_k: the vocabulary has"),
        ({"tokenizer_kwargs": {"max_length": 257}}, "parameters: max_length must be at most 256"),
        ({"targets": ["", " "]}, "At least one target"),
    ],
)
def test_parameter_that_does_not_fit_the_model_is_refused(
    model: Model, parameters: dict[str, Any], message: str
) -> None:
    (refusal,) = answers(model, ("[MASK]", parameters), ("[MASK]", {}))[:1]
    assert isinstance(refusal, Rejected)
    assert str(refusal).startswith(message)


def test_text_of_megabytes_is_refused_or_cut_without_tokenising_it_all(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a [MASK] " + "word " * 400_000
    seen: list[int] = []
    tokenizer = vars(model)["_tokenizer"]

    def watched(texts: str | list[str], **parameters: Any) -> Any:
        seen.extend(map(len, [texts] if isinstance(texts, str) else texts))
        return tokenizer(texts, **parameters)

    monkeypatch.setattr(model, "_tokenizer", watched)
    refused, cut = answers(
        model, (text, {}), (text, {"tokenizer_kwargs": {"truncation": True}, "top_k": 1})
    )
    assert str(refused).startswith("the input has about 4")
    assert "and 256 fit" in str(refused)
    assert len(cut) == 1
    assert seen == [10_000, 25_600]


def test_too_many_answers_are_refused(model: Model) -> None:
    masks = "[MASK] " * 250
    four, targets, refused = answers(
        model, (masks, {"top_k": 4}), (masks, {"top_k": 9, "targets": ["cat", "dog"]}), (masks, {})
    )
    assert (len(four), len(targets), len(targets[0])) == (250, 250, 2)
    assert str(refused) == "parameters.top_k: 250 masks ask for 1250 answers, and 1000 fit"


def test_info_tells_what_is_served(model: Model) -> None:
    assert model.info == {
        "model_id": BUNDLED,
        "revision": None,
        "task": "fill-mask",
        "architecture": "BertForMaskedLM",
        "dtype": "float32",
        "device": "cpu",
        "max_input_tokens": 256,
        "mask_token": "[MASK]",
        "batching": ANY,
    }


def test_bundled_model_knows_paris(model: Model) -> None:
    (answer,) = answers(model, (TEXTS[0], {}))
    assert "capital" in [row["token_str"] for row in answer]


def test_relative_folder_is_found_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Settings()).info["model_id"] == "models/tiny-fill-mask"


def test_pickled_weights_are_loaded_only_if_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(Path(BUNDLED, "model.safetensors")), folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="ALLOW_PICKLE=true"):
        load(Settings(model_id=str(folder)))
    assert loaded(model_id=str(folder), allow_pickle=True).info["task"] == "fill-mask"


TINY = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def test_model_that_offsets_positions_refuses_one_token_too_many(tmp_path: Path) -> None:
    config = RobertaConfig(**TINY, max_position_embeddings=12, pad_token_id=1)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    word_tokenizer(limit=None).save_pretrained(tmp_path)
    model = loaded(model_id=str(tmp_path))
    assert model.info["max_input_tokens"] == 10
    fits, too_long = answers(
        model, ("one " * 9 + "<mask>", {}), ("one " * 10 + "<mask>", {"top_k": 1})
    )
    assert len(fits) == 5
    assert isinstance(too_long, Rejected)
    (cut,) = answers(model, ("<mask> " * 20, {"tokenizer_kwargs": {"truncation": True}}))
    assert len(cut) == 10


def test_tokenizer_limit_below_the_models_counts(tmp_path: Path) -> None:
    config = RobertaConfig(**TINY, max_position_embeddings=12, pad_token_id=1)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    word_tokenizer(limit=4).save_pretrained(tmp_path)
    assert load(Settings(model_id=str(tmp_path))).info["max_input_tokens"] == 4


def one_line(settings: Settings) -> str:
    with pytest.raises(LoadError) as failure:
        load(settings)
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_missing_folder_is_named() -> None:
    expected = "cannot load model './nowhere': there is no such folder"
    assert one_line(Settings(model_id="./nowhere")) == expected


def test_unserved_architecture_is_named(tmp_path: Path) -> None:
    BertForNextSentencePrediction(BertConfig(**TINY)).save_pretrained(tmp_path)
    assert "BertForNextSentencePrediction" in one_line(Settings(model_id=str(tmp_path)))


def test_task_that_the_weights_cannot_do_is_refused(tmp_path: Path) -> None:
    BertForSequenceClassification(BertConfig(**TINY)).save_pretrained(tmp_path)
    reason = one_line(Settings(model_id=str(tmp_path), task="fill-mask"))
    assert "the weights lack cls.predictions" in reason


def test_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    BertForMaskedLM(BertConfig(**TINY | {"vocab_size": 1000})).save_pretrained(tmp_path)
    assert "the tokenizer knows" in one_line(Settings(model_id=str(tmp_path)))


def test_broken_weights_are_a_load_error(tmp_path: Path) -> None:
    config = RobertaConfig(**TINY, pad_token_id=1)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    word_tokenizer(limit=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert one_line(Settings(model_id=str(tmp_path))).startswith("cannot load model")


def test_all_benchmark_sentences_are_answered_as_by_the_untouched_pipeline(
    model: Model, untouched: Any
) -> None:
    texts = sentences()
    for start in range(0, len(texts), 50):
        some = texts[start : start + 50]
        batched = answers(model, *((text, {}) for text in some))
        assert_same(batched, [untouched(text) for text in some])


def test_number_that_is_not_finite_fails_only_the_input_that_bears_it(untouched: Any) -> None:
    model: Any = load(Settings(model_id=BUNDLED, device="cpu"))
    assert "packed" in model.info["batching"]["path"]
    positions = model._task.pipeline.model.bert.embeddings.position_embeddings.weight
    positions[40:] = float("inf")
    poison = "A long walk " * 20 + "to the [MASK]."
    first, poisoned, last = answers(
        model, ("The [MASK] barked.", {}), (poison, {}), ("A [MASK] is big.", {"top_k": 2})
    )
    assert isinstance(poisoned, ModelFailed)
    assert str(poisoned) == "the model gave no finite numbers for this input"
    assert_same(first, untouched("The [MASK] barked."))
    assert_same(last, untouched("A [MASK] is big.", top_k=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_lower_precision_mostly_agrees(dtype: Any, model: Model) -> None:
    lower = loaded(model_id=BUNDLED, device="cpu", dtype=dtype)
    assert lower.info["dtype"] == dtype
    texts = [(text, {"top_k": 1}) for text in sentences()[:100]]
    pairs = zip(answers(lower, *texts), answers(model, *texts), strict=True)
    assert sum(one[0]["token"] == other[0]["token"] for one, other in pairs) >= 90


def test_int8_is_for_the_cpu() -> None:
    assert "int8 is for the CPU" in one_line(Settings(dtype="int8", device="cuda"))


def test_large_top_k_is_answered_in_chunks(
    model: Model, untouched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_mask, "CHUNK_ELEMENTS", 8000)  # of one mask
    wishes: list[tuple[str, dict[str, Any]]] = [(TEXTS[3], {"top_k": 200}), (TEXTS[0], {})]
    for answer, (text, parameters) in zip(answers(model, *wishes), wishes, strict=True):
        assert_same(answer, untouched(text, **parameters))
