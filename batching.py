"""Batches from the queue, through the model, back to each request.

The path of a request::

    RequestQueue.submit(request)       admission: full -> Overloaded, not ready -> NotServing
      -> asyncio.Queue                 one Entry per input
      -> next_batch                    one deadline from the first input's enqueue, size cap
      -> stage(prepare, run)           [model thread] what the model cannot take is refused
      -> groups                        of a batch too large for one forward pass; each: stage(run)
      -> request.responses             put_nowait into a queue that only this request reads
      -> submit returns                or raises at the deadline

The event loop owns all state; the model thread, which is `worker.py`'s, sees values only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from config import Settings
from entries import Entry, Switch
from errors import ModelFailed, RequestError
from model import Generator, Model, Output, Staged
from queueing import RequestQueue
from stages import groups, prepare_and_run, run

logger = logging.getLogger(__name__)

# Of a batch's time, and at most: how long those whom it answered may take to come back.
RETURN_SHARE = 0.05
RETURN_MAX_S = 0.05
RECOVERY_BATCHES = 100

M = TypeVar("M", Model, Generator)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was answered.

    Attributes:
        clients: Inputs in it, and in the queue when it ended: so many may be there for the next.
        taken_s: How long it took.
        ended_at: When it ended, in `loop.time()` seconds.
    """

    clients: int
    taken_s: float
    ended_at: float


class BatchLimit:
    """How many inputs a batch may have: fewer after running out of memory, until that is past.

    Args:
        largest: When all is well.
    """

    def __init__(self, largest: int) -> None:
        self.size = largest
        self._largest = largest
        self._since = 0

    def shrink(self, failed: int) -> None:
        """Learn that a batch of `failed` inputs was too large."""
        self.size = max(1, min(self.size, failed // 2))
        self._since = 0

    def recover(self) -> None:
        """Learn that a call went well; after enough of them, try larger batches again."""
        self._since += 1
        if self._since >= RECOVERY_BATCHES and self.size < self._largest:
            self.size = min(self._largest, self.size * 2)
            self._since = 0
            logger.info("batches may have %d inputs again", self.size)


class Batcher:
    """Makes batches of what has queued and takes them through a model.

    Args:
        settings: How large, and how soon.
        queue: With the requests.
        call: Calls a function in the model thread; returns its result, or what it raised.

    Attributes:
        limit: Of the inputs of a batch.
    """

    def __init__(
        self, settings: Settings, queue: RequestQueue, call: Callable[..., Awaitable[Any]]
    ) -> None:
        self.limit = BatchLimit(settings.max_batch_size)
        self._settings = settings
        self._queue = queue
        self._metrics = queue.metrics
        self._call = call
        self._count = 0
        self._too_large = 0  # inputs that no memory was enough for, alone
        self._last = Batch(clients=0, taken_s=0.0, ended_at=0.0)

    async def run(self, model: Model) -> Switch:
        """Answer batches until a mark says that another model is to take what comes; return it."""
        while True:
            batch, switch = await self.next_batch()
            if batch:
                await self._step(model, batch)
            if switch is not None:
                return switch

    async def _step(self, model: Model, batch: list[Entry]) -> None:
        """Take one batch through the model."""
        started = asyncio.get_running_loop().time()
        split = partial(groups, max_tokens=self._settings.max_batch_tokens, pads=model.pads)
        whole = partial(prepare_and_run, split=split)
        prepared = _answer(await self.stage(model, whole, batch))
        for members in split([entry.value for entry in prepared]):
            _answer(await self.stage(model, run, [prepared[i] for i in members]))
        ended = asyncio.get_running_loop().time()
        self._queue.record_drain(len(batch), ended - started)
        self._last = Batch(len(batch) + self._queue.depth, ended - started, ended)
        self._count += 1
        if self._count % self._settings.memory_check_batches == 0:
            await self._call(model.memory.tidy)

    async def next_batch(self) -> tuple[list[Entry], Switch | None]:
        """Wait for an input, then take what comes until the batch is full or its deadline passed.

        What is queued already is taken without waiting, also past the deadline: while the model
        was busy, the next batch has built itself. A client that is alone need not wait: where
        nobody joined the last batch, this one goes at once. And the clients of a large batch that
        was just answered are on their way back: until there are as many inputs as it had and found
        waiting, a batch has a small share of its time more. Else 32 clients fall into batches of 1
        and 31 in turns, or of 16 and 16, for good.

        A switch ends the batch; it is returned with it.
        """
        entry = await self._queue.take()
        if isinstance(entry, Switch):
            return [], entry
        batch = [entry]
        now = asyncio.get_running_loop().time
        deadline = expected_by = batch[0].enqueued_at
        if self._last.clients != 1 and self._settings.batch_wait_ms:
            deadline += self._settings.batch_wait_ms / 1000
            return_s = min(RETURN_SHARE * self._last.taken_s, RETURN_MAX_S)
            expected_by = max(deadline, self._last.ended_at + return_s)
        with suppress(TimeoutError):
            while len(batch) < self.limit.size:
                until = expected_by if len(batch) < self._last.clients else deadline
                if self._queue.depth:
                    entry = await self._queue.take()
                elif now() < until:
                    async with asyncio.timeout_at(until):
                        entry = await self._queue.take()
                else:
                    break
                if isinstance(entry, Switch):
                    return batch, entry
                batch.append(entry)
        return batch, None

    async def stage(
        self, model: M, function: Callable[[M, list[Any]], Staged], entries: list[Entry]
    ) -> list[Entry]:
        """Put the values of `entries` through `function`; return the entries that passed.

        Closed and expired entries are dropped before. If the call raises, each half is tried
        alone, and so on, until only the culprit is refused.
        """
        now = asyncio.get_running_loop().time()
        live = [entry for entry in entries if entry.is_wanted(now)]
        if not live:
            return []
        outcome: Staged | BaseException = await self._call(
            function, model, [entry.value for entry in live]
        )
        if isinstance(outcome, Staged):
            self._metrics.count_call(outcome.cost)
            self.limit.recover()
            return list(_passed(live, outcome))
        if short := model.memory.is_short(outcome):
            self._metrics.out_of_memory.inc()
            await self._call(model.memory.release, outcome)
        if len(live) > 1:
            self._metrics.batch_retries.inc()
            too_large, middle = self._too_large, len(live) // 2
            halves = live[:middle], live[middle:]
            passed = [entry for half in halves for entry in await self.stage(model, function, half)]
            if short and self._too_large == too_large:  # together they were, and none alone
                self.limit.shrink(len(live))
                logger.warning("out of memory: batches have at most %d inputs", self.limit.size)
            return passed
        self._too_large += short
        reason = "the model ran out of memory" if short else "the model failed"
        logger.error("request %s: %s", live[0].request.id, reason, exc_info=outcome)
        live[0].refuse(ModelFailed(f"{reason} on this input"))
        return []


def _passed(entries: list[Entry], staged: Staged) -> Iterator[Entry]:
    """Give each entry its result and yield it; refuse those whose result is an error."""
    for entry, result in zip(entries, staged.results, strict=True):
        if isinstance(result, RequestError):
            entry.refuse(result)
            continue
        entry.value = result
        entry.went_through(staged.cost)
        yield entry


def _answer(entries: list[Entry]) -> list[Entry]:
    """Answer the entries that have their output; return the others."""
    for entry in entries:
        if isinstance(entry.value, Output):
            entry.answer(entry.value.value, entry.value.tokens)
    return [entry for entry in entries if not isinstance(entry.value, Output)]
