"""Requests, and the one queue between the HTTP side and the model.

`RequestQueue.submit` admits a request, puts one `Entry` per input on the queue and waits for the
answers. The worker in `batching.py` takes the entries and answers them. All of it runs on the
event loop; points in time are `loop.time()` seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from config import Settings
from errors import ClientGone, DeadlinePassed, NotServing, Overloaded, RequestError

RETRY_AFTER_MAX_S = 30
SMOOTHING = 0.2  # weight of the newest batch in the measured drain rate


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to one input.

    Attributes:
        index: Position of the input in its request.
        output: What the pipeline returns for this input.
        tokens: Length of the input in tokens.
        queue_ms: Time from admission until a batch took the input.
        inference_ms: Time of the forward pass and the making of its answers.
        batch_size: Inputs in that forward pass.
    """

    index: int
    output: Any
    tokens: int
    queue_ms: float
    inference_ms: float
    batch_size: int


@dataclass(slots=True, eq=False)
class Request:
    """What one client asked: its inputs, and the queue on which their answers come back.

    Attributes:
        inputs: At least one.
        parameters: Pipeline parameters, the same for all inputs.
        deadline: Point in time at which the client wants no answer any more.
        id: For the log.
        responses: Written with put_nowait by the worker and `hang_up`; read by `submit` alone.
        waiting: Those of its entries that are still in the queue.
        closed: Answered, refused, expired or abandoned: compute nothing more for it.
    """

    inputs: Sequence[Any]
    parameters: Mapping[str, Any]
    deadline: float
    id: str = "-"
    responses: asyncio.Queue[Response | RequestError] = field(default_factory=asyncio.Queue)
    waiting: set[Entry] = field(default_factory=set)
    closed: bool = False

    def hang_up(self) -> None:
        """Give the request up because its client has left."""
        self.responses.put_nowait(ClientGone("the client hung up"))


@dataclass(slots=True, eq=False)
class Entry:
    """One queued input.

    Attributes:
        value: The (input, parameters) pair, then what the model made of it.
        taken_at: When a batch took it.
        stage_s: Duration of the last call of the model that it went through.
        batch_size: Inputs in that call.
    """

    request: Request
    index: int
    value: Any
    enqueued_at: float
    taken_at: float = 0.0
    stage_s: float = 0.0
    batch_size: int = 0

    def is_wanted(self, now: float) -> bool:
        """Tell whether anybody still waits for the answer."""
        return not self.request.closed and now < self.request.deadline

    def answer(self, output: Any, tokens: int) -> None:
        """Send `output` to the request."""
        response = Response(
            self.index,
            output,
            tokens,
            queue_ms=(self.taken_at - self.enqueued_at) * 1000,
            inference_ms=self.stage_s * 1000,
            batch_size=self.batch_size,
        )
        self.request.responses.put_nowait(response)

    def refuse(self, error: RequestError) -> None:
        """Send an error to its request."""
        error = copy(error)  # the model may give the same one to several
        error.index = self.index if len(self.request.inputs) > 1 else None
        self.request.responses.put_nowait(error)


class State(StrEnum):
    """Whether requests are admitted, and if not, why."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class RequestQueue:
    """The queue, who may enter it, and who waits for an answer.

    Attributes:
        state: Requests are admitted only when ready.
        depth: Inputs that wait to be taken, without those of requests that were given up.
        in_flight: Admitted requests that have not got their answer.
    """

    def __init__(self, settings: Settings) -> None:
        self.state = State.LOADING
        self.depth = 0
        self.in_flight: set[Request] = set()
        self._max_depth = settings.max_queue_size
        self._entries: asyncio.Queue[Entry] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds_per_input = 0.0

    async def submit(self, request: Request) -> list[Response]:
        """Admit `request` and wait for the answers to its inputs, in their order.

        Raises:
            Overloaded: The queue has no room for all of its inputs.
            NotServing: The worker is not ready, or died.
            DeadlinePassed: `request.deadline` came first.
            RequestError: What refused one of its inputs; the others are given up.
        """
        self._admit(request)
        try:
            async with asyncio.timeout_at(request.deadline):
                responses = [await self._next_response(request) for _ in request.inputs]
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was ready") from None
        finally:
            self._release(request)
        return sorted(responses, key=lambda response: response.index)

    async def take(self) -> Entry:
        """Wait for the oldest input that somebody still wants.

        Cancelling the wait loses no input.
        """
        while (entry := await self._entries.get()).request.closed:
            pass
        entry.request.waiting.remove(entry)
        self.depth -= 1
        entry.taken_at = asyncio.get_running_loop().time()
        return entry

    def record_drain(self, inputs: int, seconds: float) -> None:
        """Learn the drain rate from a batch of `inputs` that took `seconds`."""
        weight = SMOOTHING if self._seconds_per_input else 1.0
        self._seconds_per_input += weight * (seconds / inputs - self._seconds_per_input)

    def retry_after_s(self) -> int:
        """Return how long the queue takes to drain at the measured rate, rounded up, 1 to 30."""
        return min(max(1, math.ceil(self.depth * self._seconds_per_input)), RETRY_AFTER_MAX_S)

    def check_serving(self) -> None:
        """Tell early what `submit` would refuse, room aside.

        Raises:
            NotServing: Nothing is admitted now.
        """
        if self.state is not State.READY:
            raise self._not_serving()

    def overloaded(self, inputs: int = 1) -> Overloaded | None:
        """Return that there is no room for so many inputs, or None: there is, or nothing serves."""
        if self.state is not State.READY or self.depth + inputs <= self._max_depth:
            return None
        return Overloaded("the queue is full", self.retry_after_s())

    def _not_serving(self) -> NotServing:
        return NotServing(f"the server is {self.state}", self.retry_after_s())

    def start_admitting(self) -> None:
        """Admit requests, unless the server is already on its way out."""
        if self.state is State.LOADING:
            self.state = State.READY

    def stop_admitting(self) -> None:
        """Refuse new requests from now on; what was admitted goes on."""
        if self.state is not State.DEAD:
            self.state = State.DRAINING

    async def drain(self, timeout_s: float) -> None:
        """Stop admitting; return when all have their answer; refuse the rest after `timeout_s`."""
        self.stop_admitting()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.refuse_all()

    def close(self) -> None:
        """Refuse all requests, now and for ever: nobody takes them any more."""
        self.state = State.DEAD
        self.refuse_all()

    def refuse_all(self) -> None:
        """Refuse every admitted request that has no answer yet."""
        for request in self.in_flight:
            request.responses.put_nowait(self._not_serving())

    def _admit(self, request: Request) -> None:
        self.check_serving()
        if (overloaded := self.overloaded(len(request.inputs))) is not None:
            raise overloaded
        self.in_flight.add(request)
        self._idle.clear()
        self.depth += len(request.inputs)
        now = asyncio.get_running_loop().time()
        for index, value in enumerate(request.inputs):
            entry = Entry(request, index, (value, request.parameters), now)
            request.waiting.add(entry)
            self._entries.put_nowait(entry)

    def _release(self, request: Request) -> None:
        """Forget `request`; what is left of it in the queue holds no inputs any more."""
        request.closed = True
        request.inputs = ()
        self.depth -= len(request.waiting)
        for entry in request.waiting:
            entry.value = None
        request.waiting.clear()
        self.in_flight.discard(request)
        if not self.in_flight:
            self._idle.set()

    @staticmethod
    async def _next_response(request: Request) -> Response:
        response = await request.responses.get()
        if isinstance(response, RequestError):
            raise response
        return response
