"""A batch through the model, and of the result only what is wanted.

A batch is laid out as blocks. A block is one call of the encoder; it has rows of equal width, and
a row holds one input or, packed, several. What the head gets is the hidden state at the wanted
tokens alone, as sequences of one token: a vocabulary is never projected where nobody looks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inference.heads import behind, direct_head

Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Block = list[list[int]]  # rows, and in each row the indices of its inputs
Plan = Callable[[Sequence[int]], list[Block]]  # lengths in tokens -> blocks

GRAPH_TOKENS = 512  # an input beyond has a block of its own, and would need a large mask

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


class Forward:
    """One way to take batches through a model.

    Args:
        model: With its head.
        plan: Lays a batch out.
        split: Run the encoder, then the head on the wanted tokens; otherwise the model as it is.
        position_offset: The position id of a first token; packed rows need it.

    Attributes:
        computed_tokens: Of the last batch, padding included; 0: the model does not tell.
    """

    def __init__(
        self, model: PreTrainedModel, plan: Plan, *, split: bool = True, position_offset: int = 0
    ) -> None:
        self.computed_tokens = 0
        self._model = model
        self._plan = plan
        self._encoder = model.base_model if split else model
        self._graph: Callable[..., torch.Tensor] | None = None
        headless = self._encoder is model
        self._direct_head = None if headless else direct_head(model, self._encoder)
        self._position_offset = position_offset
        self._pad = {"input_ids": model.config.pad_token_id or 0}

    def encode(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """Return what the head needs: [wanted tokens of the batch, width], in order."""
        self.computed_tokens = 0
        found: list[torch.Tensor] = []
        order: list[int] = []
        for block in self._plan([encoded.tokens for encoded in batch]):
            packed = max(map(len, block)) > 1
            if self._graph is not None and (packed or batch[block[0][0]].tokens <= GRAPH_TOKENS):
                hidden = self._graph(*self._arguments(block, batch, packed=True).values())
            else:
                hidden = self._encoder(**self._arguments(block, batch, packed))[0]
            if hidden.dim() == 3:  # else the whole model gave one output for each input
                self.computed_tokens += hidden.shape[0] * hidden.shape[1]
                hidden = hidden.flatten(0, 1)[_wanted(block, batch, hidden.shape[1])]
            found.append(hidden)
            order += [index for row in block for index in row]
        if order == list(range(len(batch))):
            return torch.cat(found)
        parts = torch.split(torch.cat(found), [len(batch[index].wanted) for index in order])
        return torch.cat([part for _, part in sorted(zip(order, parts, strict=True))])

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs for `hidden` (of `encode`): [tokens, outputs]."""
        if self._encoder is self._model:
            return hidden
        hidden = hidden[:, None]
        if self._direct_head is not None:
            outputs: torch.Tensor = self._direct_head(hidden)
        else:
            outputs = behind(self._model, self._encoder, hidden)
        return outputs.flatten(0, -2)

    def as_graph(self, batch: Sequence[Encoded]) -> Forward:
        """Return the same way with the encoder as a graph, recorded while it runs `batch`.

        A graph runs without Python: less to do for small models, and the event loop need not share
        its interpreter lock with each operator.

        Raises:
            RuntimeError: The encoder has no graph.
        """
        graph = copy(self)
        block = self._plan([encoded.tokens for encoded in batch])[-1]
        arguments = self._arguments(block, batch, packed=True)
        names = list(arguments)

        def run(*values: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self._encoder(**dict(zip(names, values, strict=True)))[0]
            return hidden

        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # where the encoder asks for a shape
            graph._graph = _recorded(run, tuple(arguments.values()))
        return graph

    def _arguments(self, block: Block, batch: Sequence[Encoded], packed: bool) -> dict[str, Any]:
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


def _recorded(
    function: Callable[..., torch.Tensor], arguments: tuple[torch.Tensor, ...]
) -> Callable[..., torch.Tensor]:
    """Return `function` as a graph.

    torch.compile would need a compiler here, and torch.jit.trace keeps what it has recorded until
    the process ends, weights and all. So the graph gets a unit of its own.
    """
    graph, _ = torch._C._create_graph_by_tracing(
        function, arguments, lambda _: "", True, False, None, []
    )
    unit = torch._C.CompilationUnit()
    recorded: Callable[..., torch.Tensor] = unit.create_function("recorded", graph, True)
    return recorded


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


def _wanted(block: Block, batch: Sequence[Encoded], width: int) -> list[int]:
    """Return where the wanted tokens of `block` are in its flattened rows."""
    places: list[int] = []
    for row, members in enumerate(block):
        start = row * width
        for index in members:
            places += [start + position for position in batch[index].wanted]
            start += batch[index].tokens
    return places
