"""Linear layers with the same input, such as query, key and value, as one product."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import chain, groupby

import torch
from torch import nn

from inference.heads import FAULTS

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5  # of the largest output


class Lead(nn.Module):
    """The first of several linear layers that are called with one input: it computes them all."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layer = _joined(layers)
        self._widths = [layer.out_features for layer in layers]
        self._inputs: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the first layer returns; keep what the others will."""
        return self.part(0, inputs)

    def part(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return what layer `number` returns."""
        if inputs is not self._inputs or number not in self._outputs:
            self._inputs = inputs
            self._outputs = dict(enumerate(self.layer(inputs).split(self._widths, -1)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._inputs = None
        return output


class Follower(nn.Module):
    """Another of them."""

    def __init__(self, lead: Lead, number: int) -> None:
        super().__init__()
        self._part: Callable[[int, torch.Tensor], torch.Tensor] = lead.part  # no second parent
        self._number = number

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the layer returns."""
        return self._part(self._number, inputs)


def join(model: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Join the linear layers of `model` that `run` calls one after the other with one input.

    Args:
        model: Loses what was joined if that changes what `run` returns.
        run: Calls the model.

    Returns:
        How many products are saved.
    """
    homes = {
        layer: (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    }
    expected, groups = _together(list(homes), run)
    for layers in groups:
        lead = Lead(layers)
        for number, layer in enumerate(layers):
            setattr(*homes[layer], Follower(lead, number) if number else lead)
    try:
        if torch.allclose(run(), expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
            return sum(map(len, groups)) - len(groups)
        logger.info("no layers joined: the answers differ")
    except FAULTS as fault:
        logger.info("no layers joined: %s", fault)
    for layer in chain.from_iterable(groups):
        setattr(*homes[layer], layer)
    return 0


def _together(
    layers: list[nn.Linear], run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, list[list[nn.Linear]]]:
    """Return what `run` returns, and the layers that get one input, in the order of their calls."""
    calls: list[tuple[torch.Tensor, nn.Linear]] = []  # the inputs live on: no id comes twice

    def note(layer: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append((inputs[0], layer))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        expected = run()
    finally:
        for hook in hooks:
            hook.remove()
    groups = {
        tuple(layer for _, layer in alike): None
        for _, alike in groupby(calls, key=lambda call: id(call[0]))
    }
    uses = Counter(chain.from_iterable(groups))
    return expected, [
        list(group) for group in groups if len(group) > 1 and all(uses[each] == 1 for each in group)
    ]


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    weights = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weights.shape[1], weights.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weights, requires_grad=False)
    if any(layer.bias is not None for layer in layers):
        biases = [
            weights.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
