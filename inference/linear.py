"""Faster linear layers for the CPU: weights laid out once for oneDNN, or int8.

Both use operators that are private to torch, so a layer is tried before it is replaced, and kept
as it is where the operator is missing, wrong or slower.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from inference.tuning import seconds

logger = logging.getLogger(__name__)

TOLERANCE = {  # of the largest output
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
    torch.int8: 5e-2,
}
TRIAL_TOKENS = (24, 640)  # one input alone, and a batch
TRIAL_ROUNDS = 5
GAIN = 1.1  # less is noise
LEAST_PACKED_FEATURES = 256  # smaller layers gain nothing
LEAST_INT8_FEATURES = 64
LEVELS = 126  # on each side of zero; rounding in bfloat16 may add one
ZERO = 128  # oneDNN has a fast product for unsigned inputs on every processor, for signed on some
FAULTS = (RuntimeError, AttributeError)


class PackedLinear(nn.Module):
    """A linear layer whose weight has the layout that oneDNN computes in."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        self.bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what nn.Linear returns."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, "none", [], ""
        )
        return outputs


class Int8Linear(nn.Module):
    """A linear layer in int8: weights with a scale per output, inputs with a scale per token.

    A scale per batch, as torch's own dynamic quantization has it, would let the inputs of a batch
    change one another's answers.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.scales = weight.abs().amax(1).clamp_(min=1e-12).div_(127)
        levels = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(levels, None)
        self.zeros = torch.zeros(layer.out_features, dtype=torch.int64)
        bias = layer.weight.new_zeros(()) if layer.bias is None else layer.bias.detach()
        self.bias = nn.Parameter(bias, requires_grad=False)  # so that it is cast with the others

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return nearly what nn.Linear returns: [..., in_features] -> [..., out_features]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        largest = rows.abs().amax(1, keepdim=True)
        scales = largest.clamp_(min=1e-12).div_(LEVELS)
        levels = (rows * scales.reciprocal()).round_().add_(ZERO).to(torch.uint8)
        outputs = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.weight, self.scales, self.zeros, None,
            1.0, 0, inputs.dtype, "none", [], "",
        )  # fmt: skip
        return torch.addcmul(self.bias, outputs, scales).view(*inputs.shape[:-1], -1)


def lay_out(model: nn.Module) -> int:
    """Replace the linear layers of `model` that gain by it with `PackedLinear`; return how many."""
    gains: dict[tuple[int, int], bool] = {}
    count = 0
    for parent, name, layer in list(_layers(model, LEAST_PACKED_FEATURES)):
        shape = (layer.in_features, layer.out_features)
        if shape not in gains:
            gains[shape] = _works(PackedLinear, layer, layer.weight.dtype) and _gains(layer)
        if gains[shape]:
            setattr(parent, name, PackedLinear(layer))
            count += 1
    return count


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of `model`; its buffers, such as rotary frequencies, stay precise."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def quantize(model: nn.Module) -> int:
    """Replace the linear layers of `model` with `Int8Linear`; return how many.

    The rest is cast to bfloat16 if the processor computes in it.

    Raises:
        ValueError: There is none that it can do for.
    """
    count = 0
    for parent, name, layer in list(_layers(model, LEAST_INT8_FEATURES)):
        if _works(Int8Linear, layer, torch.int8):
            setattr(parent, name, Int8Linear(layer))
            count += 1
    if not count:
        raise ValueError("dtype int8: no layer of this model can be quantized here")
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        cast(model, torch.bfloat16)
    return count


def _layers(model: nn.Module, least_features: int) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers that share their weight with no other module, and their parents."""
    uses = Counter(
        id(weight) for module in model.modules() for weight in module.parameters(recurse=False)
    )
    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) is not nn.Linear or uses[id(layer.weight)] > 1:
                continue
            if min(layer.in_features, layer.out_features) >= least_features:
                yield parent, name, layer


def _works(
    kind: type[PackedLinear] | type[Int8Linear], layer: nn.Linear, precision: torch.dtype
) -> bool:
    """Tell whether `layer` as `kind` answers like the layer itself."""
    inputs = _inputs(layer, TRIAL_TOKENS[0])
    with torch.inference_mode():
        expected = layer(inputs)
        try:
            actual = kind(layer)(inputs)
        except FAULTS as fault:
            logger.debug("no %s here", kind.__name__, exc_info=fault)
            return False
        difference = (actual - expected).abs().max() / expected.abs().max()
        return bool(difference <= TOLERANCE[precision])


def _gains(layer: nn.Linear) -> bool:
    """Tell whether the layout makes the product of the trial times smaller."""
    packed = PackedLinear(layer)
    gain = 1.0
    with torch.inference_mode():
        for tokens in TRIAL_TOKENS:
            inputs = _inputs(layer, tokens)
            plain_s, packed_s = (
                min(seconds(partial(candidate, inputs)) for _ in range(TRIAL_ROUNDS))
                for candidate in (layer, packed)
            )
            gain *= plain_s / packed_s
    return gain > GAIN


def _inputs(layer: nn.Linear, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, layer.in_features, generator=generator)
    return inputs.to(layer.weight.dtype)
