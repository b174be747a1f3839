"""The head of a model alone, behind an encoder that has run already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

# What a model may raise that is asked in a way it was not made for.
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
REASON_CHARACTERS = 200


def reason_of(fault: Exception) -> str:
    """Return what a model raised, in one line."""
    return f"{type(fault).__name__}: {fault}".partition("\n")[0][:REASON_CHARACTERS]


def direct_head(model: PreTrainedModel, encoder: nn.Module) -> nn.Module | None:
    """Return the one module that is the head of `model`, if it is one and answers alone as there.

    To call it saves what transformers does around a forward pass.
    """
    heads = [module for module in model.children() if module is not encoder]
    if len(heads) != 1:
        return None
    try:
        hidden = torch.randn(2, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
        with torch.inference_mode():
            same = torch.equal(heads[0](hidden), behind(model, encoder, hidden))
    except FAULTS:
        return None
    return heads[0] if same else None


def behind(model: PreTrainedModel, encoder: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return what `model` makes of the encoder's output `hidden`: [tokens, 1, outputs]."""
    pooler = getattr(encoder, "pooler", None)
    pooled = pooler(hidden) if pooler is not None else None
    ones = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _returning(encoder, BaseModelOutputWithPooling(hidden, pooled)):
        outputs: torch.Tensor = model(input_ids=ones, attention_mask=ones)[0]
    return outputs


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Let `module` return `output`, whatever it is called with."""
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del module.forward
