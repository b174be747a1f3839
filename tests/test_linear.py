"""Linear layers for the CPU: the same answers, or nearly, and never a batch mate's doing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inference import linear

INPUTS = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(1))


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(256, 512, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_every_precision_are_tried(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    linear.lay_out(model)
    assert model.inner(INPUTS.to(dtype)).dtype is dtype


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layer_answers_like_the_layer(bias: bool, dtype: torch.dtype) -> None:
    plain = layer(bias).to(dtype)
    with torch.inference_mode():
        actual, expected = linear.PackedLinear(plain)(INPUTS.to(dtype)), plain(INPUTS.to(dtype))
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, atol=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("bias", [True, False])
def test_int8_layer_answers_nearly_like_the_layer(bias: bool) -> None:
    plain = layer(bias)
    with torch.inference_mode():
        actual, expected = linear.Int8Linear(plain)(INPUTS), plain(INPUTS)
    assert actual.shape == expected.shape
    assert (actual - expected).norm() / expected.norm() < 0.02


def test_int8_layer_answers_a_token_alone_as_among_others() -> None:
    loud = torch.cat([INPUTS[0], 1000 * INPUTS[1]])
    quantized = linear.Int8Linear(layer())
    with torch.inference_mode():
        assert torch.equal(quantized(loud)[:7], quantized(INPUTS[0]))


def test_int8_layer_survives_zeros() -> None:
    with torch.inference_mode():
        assert torch.equal(linear.Int8Linear(layer())(torch.zeros(1, 256))[0], layer().bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 256)
        self.inner = layer()
        self.small = nn.Linear(4, 4)
        self.output = nn.Linear(256, 512)
        self.output.weight = self.embedding.weight


def test_quantize_spares_tied_and_small_layers() -> None:
    model = Tied()
    assert linear.quantize(model) == 1
    assert isinstance(model.inner, linear.Int8Linear)
    assert isinstance(model.output, nn.Linear)
    assert isinstance(model.small, nn.Linear)


def test_layer_is_packed_only_where_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    for gains in (True, False):
        model = Tied()
        monkeypatch.setattr(linear, "_gains", lambda _layer, gains=gains: gains)
        assert linear.lay_out(model) == int(gains)
        assert isinstance(model.inner, linear.PackedLinear) is gains


def missing(*_: Any) -> Any:
    raise AttributeError("no such operator")


def wrong(inputs: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.ones(len(inputs), 512)


@pytest.mark.parametrize("operator", [missing, wrong])
def test_layer_stays_where_the_operator_is_missing_or_wrong(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.PackedLinear, "forward", lambda _self, inputs: operator(inputs))
    monkeypatch.setattr(linear.Int8Linear, "forward", lambda _self, inputs: operator(inputs))
    model = Tied()
    assert linear.lay_out(model) == 0
    with pytest.raises(ValueError, match="no layer of this model can be quantized"):
        linear.quantize(model)
    assert isinstance(model.inner, nn.Linear)
