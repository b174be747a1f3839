"""The tensors of a block: what the encoder is called with, for texts that share rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Block = list[list[int]]  # rows, and in each row the indices of its inputs

# These count positions from pad_token_id + 1; fewer tokens fit than there are position embeddings.
OFFSET_POSITIONS = frozenset(
    (
        "camembert",
        "data2vec-text",
        "ibert",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    )
)


def position_offset(config: PreTrainedConfig) -> int:
    """Return the position id of an input's first token."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tokenised input.

    Attributes:
        features: What the tokenizer made but the mask: input_ids and, for some models,
            token_type_ids; each as long as the input.
        wanted: The positions, ascending, whose outputs the task needs.
        marks: What else the tokenizer said that the answer needs.
    """

    features: Mapping[str, Sequence[int]]
    wanted: Sequence[int]
    marks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.features["input_ids"])


class Arguments:
    """Makes the arguments of an encoder.

    Args:
        model: With its head.
        position_offset: The position id of a first token; packed rows need it.
    """

    def __init__(self, model: PreTrainedModel, position_offset: int) -> None:
        self._model = model
        self._position_offset = position_offset
        self._pad = {"input_ids": model.config.pad_token_id or 0}

    def of(self, block: Block, batch: Sequence[Encoded], packed: bool) -> dict[str, Any]:
        """Return the encoder's arguments for a block: tensors [rows, width], and the mask.

        Args:
            block: Of `batch`.
            batch: All of it.
            packed: Tell members of a row apart; otherwise each row has one, and maybe padding.
        """
        lengths = [[batch[index].tokens for index in row] for row in block]
        width = max(map(sum, lengths))
        arguments: dict[str, Any] = {
            name: self._joined(
                [[batch[index].features[name] for index in row] for row in block],
                width,
                self._pad.get(name, 0),
            )
            for name in batch[0].features
        }
        places, members, ends = _members(lengths, width)
        if not packed:
            arguments["attention_mask"] = self._tensor((~ends).astype(np.int64))
            return arguments
        places[ends] = 0  # an end may be longer than the model knows positions
        arguments["position_ids"] = self._tensor(places + self._position_offset)
        arguments["attention_mask"] = self._mask(self._tensor(members))
        return arguments

    def _mask(self, members: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return additive masks [rows, 1, width, width] that keep the members of a row apart.

        Args:
            members: For each token, which member of the row it belongs to, int64 [rows, width].
        """
        together = members[:, None, :, None] == members[:, None, None, :]
        config = self._model.config
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return self._additive(together)
        places = torch.arange(members.shape[1], device=members.device)
        near = (places[:, None] - places).abs() <= config.sliding_window
        return {
            "full_attention": self._additive(together),
            "sliding_attention": self._additive(together & near),
        }

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        """Return 0 where allowed: with eager attention a boolean mask would be silently wrong."""
        dtype = self._model.dtype
        forbidden = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return forbidden.masked_fill_(~allowed, torch.finfo(dtype).min)

    def _joined(self, rows: list[list[Sequence[int]]], width: int, fill: int) -> torch.Tensor:
        """Join the members of each row and fill it up to `width`."""
        filled = np.full((len(rows), width), fill)
        for row, members in zip(filled, rows, strict=True):
            joined = list(chain.from_iterable(members))
            row[: len(joined)] = joined
        return self._tensor(filled)

    def _tensor(self, values: Integers) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _members(lengths: list[list[int]], width: int) -> tuple[Integers, Integers, Flags]:
    """Tell of each token of each row its place in its member, its member, and if it is an end.

    An end is what is left of a row behind its members. It counts as one more member, since a token
    that may attend to none, not even to itself, becomes 0 / 0.
    """
    parts = np.array([part for row in lengths for part in (*row, width - sum(row))])
    last = np.array([len(row) + 1 for row in lengths]).cumsum() - 1
    shape = len(lengths), width
    starts = np.cumsum(parts) - parts
    places = np.arange(parts.sum()) - np.repeat(starts, parts)
    members = np.repeat(np.arange(len(parts)), parts).reshape(shape)
    return places.reshape(shape), members, members == last[:, None]
