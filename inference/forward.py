"""A batch through the model, and of the result only what is wanted.

A batch is laid out as blocks. A block is one call of the encoder; it has rows of equal width, and
a row holds one input or, packed, several. What the head gets is the hidden state at the wanted
tokens alone, as sequences of one token: a vocabulary is never projected where nobody looks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import copy

import torch
from transformers import PreTrainedModel

from inference.blocks import Arguments, Block, Encoded
from inference.heads import behind, direct_head

Plan = Callable[[Sequence[int]], list[Block]]  # lengths in tokens -> blocks

PROVED_TOKENS = 512  # the longest probe, and the longest input that runs as a graph


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
        self._arguments = Arguments(model, position_offset)

    def encode(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """Return what the head needs: [wanted tokens of the batch, width], in order."""
        self.computed_tokens = 0
        found: list[torch.Tensor] = []
        order: list[int] = []
        for block in self._plan([encoded.tokens for encoded in batch]):
            packed = max(map(len, block)) > 1
            if self._graph is not None and (packed or batch[block[0][0]].tokens <= PROVED_TOKENS):
                hidden = self._graph(*self._arguments.of(block, batch, packed=True).values())
            else:
                hidden = self._encoder(**self._arguments.of(block, batch, packed))[0]
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
        arguments = self._arguments.of(block, batch, packed=True)
        names = list(arguments)

        def run(*values: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self._encoder(**dict(zip(names, values, strict=True)))[0]
            return hidden

        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # where the encoder asks for a shape
            graph._graph = _recorded(run, tuple(arguments.values()))
        return graph


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


def _wanted(block: Block, batch: Sequence[Encoded], width: int) -> list[int]:
    """Return where the wanted tokens of `block` are in its flattened rows."""
    places: list[int] = []
    for row, members in enumerate(block):
        start = row * width
        for index in members:
            places += [start + position for position in batch[index].wanted]
            start += batch[index].tokens
    return places
