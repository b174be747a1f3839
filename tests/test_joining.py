"""Layers with one input, computed in one product: the same answers, or left as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from inference.joining import Follower, Lead, join

INPUTS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Three layers with one input, of which the middle one has no bias, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.query = nn.Linear(16, 8)
        self.key = nn.Linear(16, 8, bias=False)
        self.value = nn.Linear(16, 12)
        self.output = nn.Linear(12, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.query(inputs) @ self.key(inputs).transpose(1, 2)
        outputs: torch.Tensor = self.output(scores.softmax(-1) @ self.value(inputs))
        return outputs


class Twice(Attention):
    """Uses its layers more than once, as some models do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(inputs))


class InPlace(Attention):
    """Changes its input between two of the layers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        copied = inputs.clone()
        query = self.query(copied)
        copied.mul_(2)
        outputs: torch.Tensor = self.output(self.value(copied) + query.sum())
        return outputs


class Dense(Attention):
    """Wants an output of a layer to be dense."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.output(self.value(inputs) + self.query(inputs).view(-1).sum())
        return outputs


def running(model: nn.Module) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            outputs: torch.Tensor = model(INPUTS)
            return outputs

    return run


@pytest.mark.parametrize("kind", [Attention, Twice])
def test_layers_with_one_input_become_one(kind: type[Attention]) -> None:
    model = kind()
    expected = running(model)()
    assert join(model, running(model)) == 2
    assert isinstance(model.query, Lead)
    assert isinstance(model.value, Follower)
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 2
    for _ in range(2):
        assert torch.allclose(running(model)(), expected, atol=1e-6)


def test_layers_called_out_of_turn_still_answer() -> None:
    model, plain = Attention(), Attention()
    join(model, running(model))
    with torch.inference_mode():
        for inputs in (INPUTS, 2 * INPUTS):
            for name in ("value", "value", "query", "key", "key"):
                actual, expected = (getattr(each, name)(inputs) for each in (model, plain))
                assert torch.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [InPlace, Dense])
def test_what_cannot_be_joined_stays_as_it_was(kind: type[Attention]) -> None:
    model = kind()
    expected = running(model)()
    assert join(model, running(model)) == 0
    assert all(type(layer) is nn.Linear for layer in model.children())
    assert torch.equal(running(model)(), expected)
