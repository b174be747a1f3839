"""Every query of a step sees the keys of its own text, and a wrong attention is not kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from inference import attention, ragged
from tests.tiny_causal import saved_causal

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
LENGTHS = {  # (queries, keys) of each text
    "next tokens": [(1, 5), (1, 9), (1, 1)],
    "one next token": [(1, 7)],
    "prompts": [(4, 4), (1, 1), (6, 6)],
    "prompts in pieces": [(3, 10), (1, 12), (1, 3), (5, 5)],
    "side by side would be large": [(1, 40_000), (1, 40_000), (1, 3)],
}


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_text_is_seen_as_if_it_were_alone(lengths: list[tuple[int, int]]) -> None:
    torch.manual_seed(1)
    queries, keys = (list(each) for each in zip(*lengths, strict=True))
    query = torch.randn(1, HEADS, sum(queries), WIDTH)
    key, value = torch.randn(2, 1, KEY_HEADS, sum(keys), WIDTH)
    arguments: Any = {"cu_seq_lens_q": starts(queries), "cu_seq_lens_k": starts(keys)}
    attention = ragged.Ragged()
    module = torch.nn.Identity()
    found, _ = attention(module, query, key, value, None, scaling=0.3, **arguments)
    again, _ = attention(module, query, key, value, None, scaling=0.3, **arguments)  # a next layer
    assert torch.equal(found, again)
    q = k = 0
    for count, length in lengths:
        mask = torch.ones(count, length).tril(length - count).bool()
        expected = scaled_dot_product_attention(
            query[:, :, q : q + count],
            key[:, :, k : k + length],
            value[:, :, k : k + length],
            mask,
            scale=0.3,
            enable_gqa=True,
        )
        assert torch.allclose(found[:, q : q + count], expected.transpose(1, 2), atol=1e-5)
        q, k = q + count, k + length


def test_what_it_does_not_know_is_refused() -> None:
    query = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match="softcap"):
        ragged.Ragged()(torch.nn.Identity(), query, query, query, None, softcap=30.0)


def swapped(*arguments: Any, **names: Any) -> tuple[torch.Tensor, None]:
    output, _ = ragged.Ragged()(*arguments, **names)
    return output.flip(1), None


def forgetful(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **names: Any
) -> tuple[torch.Tensor, None]:
    key = key.clone()
    key[:, :, 0] = 0
    return ragged.Ragged()(module, query, key, value, mask, **names)


def failing(*arguments: Any, **names: Any) -> tuple[torch.Tensor, None]:
    raise ValueError("not here")


@pytest.mark.parametrize("wrong", [swapped, forgetful, failing])
def test_a_wrong_attention_is_not_kept(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register() -> None:
        AttentionInterface.register(ragged.NAME, wrong)

    monkeypatch.setattr(ragged, "register", register)
    model = AutoModelForCausalLM.from_pretrained(saved_causal(tmp_path)).eval()
    assert attention.settle(model) == "sdpa"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_attention_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved_causal(tmp_path), dtype=dtype).eval()
    assert attention.settle(model) == ragged.NAME


def test_doubt_is_large_of_other_tokens_and_none_of_the_likeliest(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved_causal(tmp_path)).eval()
    rng = random.Random(2)
    prompt = rng.choices(range(600), k=20)
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
    new = tokens[0, 20:].tolist()
    assert attention._doubt(model, prompt, new) == 0
    assert attention._doubt(model, prompt, rng.choices(range(600), k=6)) > 0.1
