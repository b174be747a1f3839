"""Requests, their inputs on the queue, and what comes back to them.

All of it lives on the event loop. Deadlines are `loop.time()` seconds, other points in time
`time.monotonic()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from errors import ClientGone, RequestError
from model import Cost, Generator, Model, Piece


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to one input.

    Attributes:
        index: Position of the input in its request.
        output: What the pipeline returns for this input.
        tokens: Length of the input in tokens.
        queue_ms: Time from admission until a batch took the input.
        prepare_ms: Time in which the batch was tokenised.
        inference_ms: Time of the forward pass.
        finish_ms: Time in which the answers of the batch were written.
        batch_size: Inputs in that forward pass.
    """

    index: int
    output: Any
    tokens: int
    queue_ms: float
    prepare_ms: float
    inference_ms: float
    finish_ms: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the answer to one input.

    Attributes:
        index: Position of the input in its request.
        piece: What the model has generated since the last one.
    """

    index: int
    piece: Piece


Event: TypeAlias = "Response | Part | RequestError"


@dataclass(slots=True, eq=False)
class Request:
    """What one client asked: its inputs, and the queue on which their answers come back.

    Attributes:
        inputs: At least one.
        parameters: Pipeline parameters, the same for all inputs.
        deadline: Point in time at which the client wants no answer any more.
        id: For the log.
        streams: Wants its answers piece by piece.
        responses: Written with put_nowait by the worker and `hang_up`; read by the queue alone.
        waiting: Those of its entries that are still in the queue.
        running: Those that the model generates for, and how to stop each.
        closed: Answered, refused, expired or abandoned: compute nothing more for it.
    """

    inputs: Sequence[Any]
    parameters: Mapping[str, Any]
    deadline: float
    id: str = "-"
    streams: bool = False
    responses: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    waiting: set[Entry] = field(default_factory=set)
    running: dict[Entry, Callable[[], None]] = field(default_factory=dict)
    closed: bool = False

    def hang_up(self) -> None:
        """Give the request up because its client has left."""
        self.responses.put_nowait(ClientGone("the client hung up"))


@dataclass(frozen=True, slots=True, eq=False)
class Switch:
    """A mark on the queue: what comes after it is for another model.

    Attributes:
        model: Loaded.
        taken: Set when it answers what comes.
        done: Set when the model before has answered all that came before, and is dropped.
    """

    model: Model | Generator
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Entry:
    """One queued input.

    Attributes:
        value: The (input, parameters) pair, then what the model made of it.
        taken_at: When a batch took it.
        prepare_s, forward_s, finish_s: What the calls took that it went through.
        batch_size: Inputs in the last of them.
    """

    request: Request
    index: int
    value: Any
    enqueued_at: float
    taken_at: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    finish_s: float = 0.0
    batch_size: int = 0

    def is_wanted(self, now: float) -> bool:
        """Tell whether anybody still waits for the answer."""
        return not self.request.closed and now < self.request.deadline

    def went_through(self, cost: Cost) -> None:
        """Note a call of the model that it went through with others."""
        self.prepare_s += cost.prepare_s
        self.forward_s += cost.forward_s
        self.finish_s += cost.finish_s
        self.batch_size = cost.inputs

    def answer(self, output: Any, tokens: int) -> None:
        """Send `output` to the request."""
        response = Response(
            self.index,
            output,
            tokens,
            queue_ms=(self.taken_at - self.enqueued_at) * 1000,
            prepare_ms=self.prepare_s * 1000,
            inference_ms=self.forward_s * 1000,
            finish_ms=self.finish_s * 1000,
            batch_size=self.batch_size,
        )
        self.request.responses.put_nowait(response)

    def send(self, piece: Piece) -> None:
        """Send a piece of the answer to the request, if it wants any."""
        if self.request.streams:
            self.request.responses.put_nowait(Part(self.index, piece))

    def refuse(self, error: RequestError) -> None:
        """Send an error to its request."""
        error = copy(error)  # the model may give the same one to several
        error.index = self.index if len(self.request.inputs) > 1 else None
        self.request.responses.put_nowait(error)
