"""Families of causal language models, in process: served right, or refused at load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Settings
from errors import LoadError
from inference import ragged
from inference.generation import GenerationModel
from inference.loading import load
from tests.tiny_causal import saved_causal

NEW_TOKENS = 12
LOCAL: dict[str, Any] = {"sliding_window": 24, "query_pre_attn_scalar": 16, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
RAGGED: dict[str, dict[str, Any]] = {
    "gpt2": {"num_key_value_heads": 4},
    "gptj": {"num_key_value_heads": 4, "rotary_dim": 8},
    "phi3": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **EXPERTS},
}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "gemma2": LOCAL,
    "gemma3_text": LOCAL,
    "gpt_oss": {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4},
}


def loaded(folder: str, **settings: Any) -> GenerationModel:
    model = load(Settings(model_id=folder, task="text-generation", cache_tokens=4096, **settings))
    assert isinstance(model, GenerationModel)
    return model


def texts(model: GenerationModel, prompts: Sequence[list[int]]) -> list[str]:
    """Return what `model` generates for all of `prompts` at a time."""

    async def ask(prepared: Any) -> str:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        model.start(prepared, answer.set_result, False)
        text: str = (await asyncio.wait_for(answer, 30)).value.text
        return text

    async def ask_all() -> list[str]:
        prepared = model.prepare([(each, {"max_new_tokens": NEW_TOKENS}) for each in prompts])
        return await asyncio.gather(*map(ask, prepared))

    try:
        return asyncio.run(ask_all())
    finally:
        model.close()


def untouched(folder: str, prompts: Sequence[list[int]]) -> list[str]:
    """Return what the model and its own `generate` make of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=2
        )
        found.append(tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True))
    return found


def some_prompts(count: int = 8) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(3, 600), k=rng.randint(1, 90)) for _ in range(count)]


@pytest.mark.parametrize("kind", [*RAGGED, *OTHERS])
def test_greedy_answers_are_those_of_the_untouched_model(kind: str, tmp_path: Path) -> None:
    folder = saved_causal(tmp_path, kind=kind, **(RAGGED | OTHERS)[kind])
    model = loaded(folder)
    assert (model.info["attention"] == ragged.NAME) == (kind in RAGGED)
    assert texts(model, some_prompts()) == untouched(folder, some_prompts())


@pytest.mark.parametrize("kind", ["opt", "gpt_neox", "bloom", "mamba"])
def test_what_the_engine_cannot_run_is_refused_at_load(kind: str, tmp_path: Path) -> None:
    folder = saved_causal(tmp_path, kind=kind, ffn_dim=96, word_embed_proj_dim=64)
    with pytest.raises(LoadError, match="engine for generation does not take it"):
        loaded(folder)


def test_a_model_spread_over_devices_answers_alike(tmp_path: Path) -> None:
    folder = saved_causal(tmp_path)
    assert texts(loaded(folder, device_map="auto"), some_prompts()) == untouched(
        folder, some_prompts()
    )


def test_model_kwargs_reach_the_model(tmp_path: Path) -> None:
    folder = saved_causal(tmp_path)
    model = loaded(folder, model_kwargs={"attn_implementation": "eager", "dtype": "bfloat16"})
    assert model._engine._model.dtype is torch.bfloat16
    assert len(texts(model, some_prompts(2))) == 2


def test_model_kwargs_that_nobody_knows_are_told_at_load(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="wings"):
        loaded(saved_causal(tmp_path), model_kwargs={"wings": 2})
