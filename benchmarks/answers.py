"""What the right answers are: those of the untouched pipeline, one text at a time, in float32."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.load import Answer
from benchmarks.models import FOLDER, sentences

TOLERANCE = 1e-5
RELATIVE_TOLERANCE = 1e-3  # the models are random: their scores are no larger than 1e-4
KEYS = {"score", "token", "token_str", "sequence"}
COUNT = 5

Candidates = list[dict[str, Any]]


def references(model: Path) -> list[Candidates]:
    """Return the answers to `sentences()` of the model in a folder; kept for the next call."""
    weights = (model / "model.safetensors").stat()
    texts = sentences()
    key = json.dumps([weights.st_mtime_ns, weights.st_size, texts])
    name = f"{model.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    cache = FOLDER.parent / "references" / name
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(_compute(model, texts)), encoding="utf-8")
    answers: list[Candidates] = json.loads(cache.read_text(encoding="utf-8"))
    return answers


def _compute(model: Path, texts: Sequence[str]) -> list[Candidates]:
    transformers.logging.set_verbosity_error()
    pipeline = transformers.pipeline("fill-mask", model=str(model), dtype=torch.float32)
    return [pipeline(text) for text in texts]


def faults(answers: Sequence[Answer], expected: Sequence[Candidates] | None) -> Counter[str]:
    """Count what is wrong with `answers`, by kind; empty if nothing is.

    Args:
        answers: Of one run.
        expected: The right ones, by index of the text; None if only their form is to be checked.
    """
    found = (
        fault(answer, expected[answer.text] if expected is not None else None) for answer in answers
    )
    return Counter(kind for kind in found if kind)


def fault(answer: Answer, expected: Candidates | None) -> str | None:
    """Name what is wrong with one answer, if anything is."""
    if answer.status != 200:
        return f"status {answer.status}"
    got = candidates(answer.body)
    if got is None:
        return "form"
    if expected is None:
        return None
    if [each["token"] for each in got] != [each["token"] for each in expected]:
        return "tokens"
    for mine, right in zip(got, expected, strict=True):
        if any(mine[key] != right[key] for key in ("token_str", "sequence")):
            return "words"
        tolerance = min(TOLERANCE, RELATIVE_TOLERANCE * right["score"])
        if not abs(mine["score"] - right["score"]) <= tolerance:  # not NaN either
            return "score"
    return None


def candidates(body: bytes) -> Candidates | None:
    """Return the candidates that `body` lists, or None if it does not list COUNT of them.

    A server whose route takes a list of texts answers a list of one with a list of one.
    """
    try:
        got = json.loads(body)
    except ValueError:
        return None
    if isinstance(got, list) and len(got) == 1:
        got = got[0]
    if not isinstance(got, list) or len(got) != COUNT:
        return None
    return got if all(isinstance(each, dict) and each.keys() == KEYS for each in got) else None
