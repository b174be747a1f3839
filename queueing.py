"""The one queue between the HTTP side and the model.

`RequestQueue.submit` admits a request, puts one `Entry` per input on the queue and waits for the
answers. The worker takes the entries and answers them (`batching.py`). All of it runs on the
event loop; points in time are `loop.time()` seconds, and those of entries `time.monotonic()`: the
same clock, but uvloop looks at it once per turn and tells no more than ms.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from enum import StrEnum

from config import Settings
from entries import Entry, Part, Request, Response, Switch
from errors import DeadlinePassed, Interrupted, NotServing, Overloaded, RequestError
from metrics import Metrics

RETRY_AFTER_MAX_S = 30
TOO_LATE = (
    "the deadline passed before the answer was ready; "
    "REQUEST_TIMEOUT_S and X-Request-Timeout say how long it may take"
)
SMOOTHING = 0.2  # weight of the newest batch in the measured drain rate


class State(StrEnum):
    """Whether requests are admitted, and if not, why."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DEAD = "dead"


class RequestQueue:
    """The queue, who may enter it, and who waits for an answer.

    Attributes:
        state: Requests are admitted only when ready.
        depth: Inputs that wait to be taken, without those of requests that were given up.
        in_flight: Admitted requests that have not got their answer.
        metrics: Count what happens to requests.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.state = State.LOADING
        self.depth = 0
        self.in_flight: set[Request] = set()
        self.metrics = metrics
        self._max_depth = settings.max_queue_size
        self._entries: asyncio.Queue[Entry | Switch] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds_per_input = 0.0

    async def submit(self, request: Request) -> list[Response]:
        """Admit `request` and wait for the answers to its inputs, in their order.

        Raises:
            Overloaded: The queue has no room for all of its inputs.
            NotServing: The worker is not ready, or ended before it began with the request.
            Interrupted: The worker ended after that.
            DeadlinePassed: `request.deadline` came first.
            RequestError: What refused one of its inputs; the others are given up.
        """
        self._admit(request)
        responses: list[Response] = []
        try:
            async with asyncio.timeout_at(request.deadline):
                while len(responses) < len(request.inputs):
                    event = await self._next_event(request)
                    assert isinstance(event, Response)
                    responses.append(event)
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        finally:
            self._release(request)
        return sorted(responses, key=lambda response: response.index)

    async def stream(
        self, request: Request, silence_s: float
    ) -> AsyncGenerator[Response | Part | None]:
        """Admit `request` and yield what comes back: parts of answers, and a response for each.

        None is yielded when nothing has come for `silence_s`. To close the generator early is to
        give the request up. Raises what `submit` raises.
        """
        self._admit(request)
        now = asyncio.get_running_loop().time
        unanswered = len(request.inputs)
        try:
            while unanswered:
                silent_at = now() + silence_s
                try:
                    async with asyncio.timeout_at(min(silent_at, request.deadline)):
                        event = await self._next_event(request)
                except TimeoutError:
                    if now() >= request.deadline:
                        raise DeadlinePassed(TOO_LATE) from None
                    yield None
                    continue
                unanswered -= isinstance(event, Response)
                yield event
        finally:
            self._release(request)

    async def take(self) -> Entry | Switch:
        """Wait for the oldest input that somebody still wants, and begin it.

        Cancelling the wait loses no input.
        """
        entry = await self.next()
        if isinstance(entry, Entry):
            self.begin(entry)
        return entry

    async def next(self) -> Entry | Switch:
        """Wait for the oldest input that somebody still wants; until it begins, it still waits."""
        while isinstance(entry := await self._entries.get(), Entry) and entry.request.closed:
            pass
        return entry

    def switch(self, switch: Switch) -> None:
        """Have what is admitted from now on answered by another model."""
        self._entries.put_nowait(switch)

    def begin(self, entry: Entry) -> None:
        """Note that `entry`, which is still wanted, waits no longer."""
        entry.request.waiting.remove(entry)
        self.depth -= 1
        entry.taken_at = time.monotonic()
        self.metrics.queue_duration.observe(entry.taken_at - entry.enqueued_at)

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
        return Overloaded("the queue is full", self.retry_after_s(), "queue_full")

    def _not_serving(self) -> NotServing:
        return NotServing(f"the server is {self.state}", self.retry_after_s(), self.state)

    def start_admitting(self) -> None:
        """Admit requests, unless the server is already on its way out."""
        if self.state in (State.LOADING, State.RECOVERING):
            self.state = State.READY

    def suspend(self) -> None:
        """Refuse new requests until `start_admitting`: the model is being built anew."""
        if self.state is State.READY:
            self.state = State.RECOVERING

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
        """Refuse every admitted request that has no answer yet.

        Those that nothing was computed for are told so: another server may take them.
        """
        for request in self.in_flight:
            error: RequestError = self._not_serving()
            if len(request.waiting) < len(request.inputs):
                error = Interrupted("the server ended before it had an answer")
            request.responses.put_nowait(error)

    def _admit(self, request: Request) -> None:
        self.check_serving()
        if (overloaded := self.overloaded(len(request.inputs))) is not None:
            raise overloaded
        self.in_flight.add(request)
        self._idle.clear()
        self.depth += len(request.inputs)
        now = time.monotonic()
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
        for stop in tuple(request.running.values()):
            stop()
        self.in_flight.discard(request)
        if not self.in_flight:
            self._idle.set()

    @staticmethod
    async def _next_event(request: Request) -> Response | Part:
        event = await request.responses.get()
        if isinstance(event, RequestError):
            raise event
        return event
