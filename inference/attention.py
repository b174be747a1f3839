"""Which attention a causal model runs with in the engine, tried against the model itself."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from inference import ragged
from inference.engine import likeliest

logger = logging.getLogger(__name__)

SEED = 6
TRIAL_PROMPTS = (1, 70, 5, 33, 120)  # tokens; with a page border, and prompts in several steps
TRIAL_NEW_TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def settle(model: PreTrainedModel) -> str:
    """Give `model` the fastest attention that is right for it in the engine; return its name.

    Raises:
        ValueError: None is; not even the model's own.
    """
    own: str = model.config._attn_implementation
    ways = [own]
    if model.device.type == "cpu":
        ragged.register()
        ways = [ragged.NAME, own]
    words = model.get_input_embeddings().num_embeddings
    draw = random.Random(SEED)
    prompts = [draw.choices(range(words), k=length) for length in TRIAL_PROMPTS]
    refused: dict[str, str] = {}
    for way in ways:
        model.config._attn_implementation = way
        try:
            found = likeliest(model, prompts, TRIAL_NEW_TOKENS)
        except ValueError as error:  # the engine has no cache for such layers
            found = [str(error)]
        model.config._attn_implementation = own
        fault = _fault(model, prompts, found)
        if fault is None:
            model.config._attn_implementation = way
            reasons = "".join(f"; not {name}: {reason}" for name, reason in refused.items())
            logger.info("attention: %s%s", way, reasons)
            return way
        refused[way] = fault
    raise ValueError(f"transformers' engine for generation does not take it: {refused[own]}")


def _fault(
    model: PreTrainedModel, prompts: Sequence[list[int]], found: Sequence[Any]
) -> str | None:
    """Return what is wrong with what was generated after `prompts`.

    To be right is to choose tokens that the model with its own attention finds likeliest too, as
    nearly as its precision can tell.
    """
    for prompt, new in zip(prompts, found, strict=False):
        if not isinstance(new, list):
            return str(new)
        if (doubt := _doubt(model, prompt, new)) > TOLERANCE[model.dtype]:
            return f"the answers differ by {doubt:.2g}"
    return None


@torch.inference_mode()
def _doubt(model: PreTrainedModel, prompt: list[int], new: list[int]) -> float:
    """Return how far `new` is from what `model` itself finds likeliest after `prompt`.

    0: each token is; else the largest distance of a score from the best, of the whole range.
    """
    tokens = torch.tensor([prompt + new], device=model.device)
    scores = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best, worst = scores.amax(-1), scores.amin(-1)
    chosen = scores.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    return float(((best - chosen) / (best - worst)).max())
