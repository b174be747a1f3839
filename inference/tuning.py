"""What only a measurement on this machine can tell; taken at load, within a bound of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from inference import plans
from inference.blocks import Encoded
from inference.forward import Forward

BUDGET_S = 2.0
ROUNDS = 3
MANY = 32
TYPICAL_TOKENS = (14, 20, 9, 41, 26, 17, 60, 12, 31, 8, 22, 105, 18, 35, 11, 24)

Option = TypeVar("Option")


def fastest(options: Mapping[Option, Callable[[], object]]) -> Option:
    """Return the option whose call takes the least time.

    The options take turns, so that a disturbance meets all of them alike; the first round is not
    counted. After BUDGET_S no further round starts.
    """
    best = dict.fromkeys(options, float("inf"))
    ends = time.perf_counter() + BUDGET_S
    for number in range(ROUNDS + 1):
        for option, call in options.items():
            taken_s = seconds(call)
            if number:
                best[option] = min(best[option], taken_s)
        if time.perf_counter() > ends and number:
            break
    return min(best, key=best.__getitem__)


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def overhead_tokens(model: PreTrainedModel, example: Encoded) -> float:
    """Return how many tokens could be computed in the time that a call costs anyway.

    Args:
        model: Its encoder is called.
        example: A short input.
    """
    forward = Forward(model, plans.grouped(float("inf")))
    with torch.inference_mode():
        few_s, many_s = (
            min(seconds(partial(forward.encode, [example] * count)) for _ in range(ROUNDS))
            for count in (1, MANY)
        )
    per_token_s = max(many_s - few_s, 1e-9) / (example.tokens * (MANY - 1))
    return max(0.0, few_s / per_token_s - example.tokens)


def typical_batch(like: Encoded) -> list[Encoded]:
    """Return a batch of the lengths that people write, mostly short, none longer than `like`."""
    return [
        Encoded({name: values[:length] for name, values in like.features.items()}, [0])
        for length in TYPICAL_TOKENS
    ]
