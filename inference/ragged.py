"""Attention on the CPU for texts of different lengths in one step of continuous batching.

transformers' engine joins the keys of all texts into one row, and lets every query look at all of
them behind a mask: the work grows with the square of the number of texts. Here each query meets
the keys of its own text alone. Texts that only ask for their next token are laid side by side
where that takes few copies, else they are taken one after the other.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# The engine makes no mask for an attention with "flash" in its name.
NAME = "ragged_flash"
UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
SIDE_BY_SIDE = 1 << 20  # numbers copied; beyond, one after the other is faster


@dataclass(frozen=True, slots=True)
class Text:
    """Where the queries and the keys of a text are in their rows."""

    query: slice
    key: slice

    @property
    def queries(self) -> int:
        """How many there are."""
        return int(self.query.stop - self.query.start)

    @property
    def keys(self) -> int:
        """How many there are."""
        return int(self.key.stop - self.key.start)


@dataclass(frozen=True, slots=True)
class Step:
    """How the texts of a step lie; the same in all layers.

    Attributes:
        ends: The engine's tensor that this was made of.
        alone: Texts that are taken one after the other.
        together: Where the queries of the others are; none: they are taken one after the other.
        places: Where the keys of those are, one text after the other, padded.
        mask: 0 for a key, -inf for padding: [texts, 1, 1, keys].
    """

    ends: torch.Tensor
    alone: list[Text]
    together: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor


class Ragged(threading.local):
    """The attention function; an engine has a thread of its own, and so a step of its own."""

    step: Step | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return what each query sees: [1, queries, heads, width].

        Args:
            module: Whose attention this is.
            query: [1, heads, queries, width].
            key: [1, key-value heads, keys, width].
            value: As `key`.
            attention_mask: None.
            arguments: Of the engine.

        Raises:
            ValueError: The model wants what is not done here.
        """
        unknown = [name for name in UNKNOWN if arguments.get(name) is not None]
        if unknown or attention_mask is not None:
            raise ValueError(f"no {', '.join(unknown) or 'mask'} here")
        ends, scale = arguments["cu_seq_lens_k"], arguments.get("scaling")
        if self.step is None or self.step.ends is not ends:
            numbers = key.shape[1] * key.shape[3]
            self.step = _step(arguments["cu_seq_lens_q"].tolist(), ends, numbers, key.dtype)
        step = self.step
        output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        if len(step.together):
            output[step.together] = _together(query, key, value, step, scale)
        for text in step.alone:
            output[text.query] = _alone(query, key, value, text, scale)
        return output[None], None


def register() -> None:
    """Make the attention known to transformers."""
    AttentionInterface.register(NAME, Ragged())


def _step(starts: list[int], ends: torch.Tensor, numbers: int, dtype: torch.dtype) -> Step:
    """Lay the texts of a step out.

    Args:
        starts: Of the queries of each text, and the end of the last.
        ends: Of the keys, the same.
        numbers: That a key has.
        dtype: Of the mask.
    """
    texts = [
        Text(slice(*queries), slice(*keys))
        for queries, keys in zip(pairwise(starts), pairwise(ends.tolist()), strict=True)
    ]
    single = [text for text in texts if text.queries == 1]
    width = max((text.keys for text in single), default=0)
    if len(single) * width * numbers > SIDE_BY_SIDE or len(single) < 2:
        single = []
    places = torch.zeros(len(single), width, dtype=torch.long)
    mask = torch.full((len(single), 1, 1, width), -math.inf, dtype=dtype)
    for row, text in enumerate(single):
        places[row, : text.keys] = torch.arange(text.key.start, text.key.stop)
        mask[row, :, :, : text.keys] = 0
    alone = [text for text in texts if text.queries > 1] if single else texts
    together = torch.tensor([text.query.start for text in single], dtype=torch.long)
    return Step(ends, alone, together, places.flatten(), mask)


def _together(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, scale: float | None
) -> torch.Tensor:
    """Return what the single queries see: [texts, heads, width]."""
    rows, heads = len(step.together), key.shape[1]

    def padded(each: torch.Tensor) -> torch.Tensor:
        """Copy keys [1, heads, keys, width] to [texts, heads, keys, width]."""
        copied = each[0].transpose(0, 1).index_select(0, step.places)
        return copied.view(rows, -1, heads, each.shape[3]).transpose(1, 2)

    queries = query[0].index_select(1, step.together).transpose(0, 1)
    grouped = queries.reshape(rows, heads, -1, query.shape[3])  # the heads that share a key
    seen = scaled_dot_product_attention(
        grouped, padded(key), padded(value), attn_mask=step.mask, scale=scale
    )
    return seen.reshape(rows, query.shape[1], -1)


def _alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, text: Text, scale: float | None
) -> torch.Tensor:
    """Return what the queries of one text see: [queries, heads, width]."""
    queries, keys, values = query[:, :, text.query], key[:, :, text.key], value[:, :, text.key]
    if text.queries == 1:
        grouped = queries.reshape(1, key.shape[1], -1, query.shape[3])
        seen = scaled_dot_product_attention(grouped, keys, values, scale=scale)
        return seen.reshape(1, query.shape[1], -1)
    mask = None
    if text.keys > text.queries:  # the first of the queries is not the first of the text
        places = torch.arange(text.keys)
        mask = places <= places[-text.queries :, None]
    seen = scaled_dot_product_attention(
        queries, keys, values, mask, scale=scale, is_causal=mask is None, enable_gqa=True
    )
    return seen[0].transpose(0, 1)
