"""Small models on disk, and ways to ask them and to compare their answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from config import Settings
from inference.loading import load
from inference.text import PreparedInput
from model import Generator, Model

BUNDLED = str(Path(__file__).parent.parent / "models" / "tiny-fill-mask")


def saved_model(folder: Path, auto: Any, **config: Any) -> str:
    """Save a random model of the bundled one's size, with its tokenizer; return the folder."""
    if "id2label" in config:
        config["label2id"] = {label: number for number, label in config["id2label"].items()}
    torch.manual_seed(3)
    model = auto.from_config(AutoConfig.from_pretrained(BUNDLED, **config))
    for weights in model.parameters():
        if weights.dim() > 1:  # far enough from zero that texts differ
            torch.nn.init.normal_(weights, std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(folder)
    return str(folder)


def loaded(**settings: Any) -> Model:
    """Load a model that answers in batches."""
    model = load(Settings(**settings))
    assert not isinstance(model, Generator)
    return model


def answers(model: Model, *inputs: tuple[Any, Mapping[str, Any]]) -> list[Any]:
    """Take `inputs` through the model as one batch; invalid ones stay in place as errors."""
    prepared = model.prepare(inputs)
    valid = iter(model.run([each for each in prepared if isinstance(each, PreparedInput)]))
    return [next(valid) if isinstance(each, PreparedInput) else each for each in prepared]


def assert_same(actual: Any, expected: Any) -> None:
    """Compare pipeline outputs: equal to the last key, numbers within float32 rounding.

    The untouched pipeline differs from itself by up to 2e-6 between alone and batched.
    """
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_same(actual[name], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, str | int | None):
        assert actual == expected
    else:
        assert abs(actual - float(expected)) <= 1e-5
