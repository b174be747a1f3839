"""The worker: batches from the queue, through the model, back to each request.

The path of a request::

    RequestQueue.submit(request)       admission: full -> Overloaded, not ready -> NotServing
      -> asyncio.Queue                 one Entry per input
      -> next_batch                    one deadline from the first input's enqueue, size cap
      -> stage(prepare, run)           [model thread] what the model cannot take is refused
      -> groups                        of a batch too large for one forward pass; each: stage(run)
      -> request.responses             put_nowait into a queue that only this request reads
      -> submit returns                or raises at the deadline

The event loop owns all state; the model thread sees values only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from config import Settings
from entries import Entry, Switch
from errors import LoadError, ModelFailed, RequestError
from generating import Generation
from queueing import RequestQueue, State
from stages import Generator, Model, Output, Staged, attempt, groups, prepare, prepare_and_run, run

logger = logging.getLogger(__name__)

# Of a batch's time, and at most: how long those whom it answered may take to come back.
RETURN_SHARE = 0.05
RETURN_MAX_S = 0.05
RECOVERY_BATCHES = 100


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was answered: its inputs, how long it took, and when it ended (loop.time())."""

    size: int
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
        """Learn that a batch went well; after enough of them, try larger ones again."""
        self._since += 1
        if self._since >= RECOVERY_BATCHES and self.size < self._largest:
            self.size = min(self._largest, self.size * 2)
            self._since = 0
            logger.info("batches may have %d inputs again", self.size)


class Worker:
    """The one owner of the model.

    Attributes:
        model: None until it is loaded.
        limit: Of the inputs of a batch.
    """

    def __init__(
        self,
        settings: Settings,
        queue: RequestQueue,
        load: Callable[[], Model | Generator],
    ) -> None:
        self.model: Model | Generator | None = None
        self._call_started_at: float | None = None
        self._generations: set[Generation] = set()
        self._settings = settings
        self._queue = queue
        self._load = load
        self._metrics = queue.metrics
        self.limit = BatchLimit(settings.max_batch_size)
        self._batches = 0
        self._last = Batch(size=0, taken_s=0.0, ended_at=0.0)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self) -> None:
        """Load the model, then answer batches until cancelled.

        However this ends, nobody is left waiting: all that was admitted is refused.

        Raises:
            LoadError: The model cannot be loaded.
            RuntimeError: The model ended its thread.
        """
        try:
            self.model = await self._load_model()
            self._queue.start_admitting()
            await (self._generate() if isinstance(self.model, Generator) else self._batch())
        except LoadError as error:
            logger.critical("%s", error)
            raise
        except Exception:
            logger.critical("the worker ended", exc_info=True)
            raise
        finally:
            self._queue.close()
            if isinstance(self.model, Generator):
                self.model.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def busy_since(self) -> float | None:
        """Since when the model has owed something, in `loop.time()` seconds; None: it is idle."""
        waits = [self._call_started_at, *(each.waits_since for each in self._generations)]
        return min((since for since in waits if since is not None), default=None)

    def alive(self) -> bool:
        """Tell whether the worker makes progress: it has not ended, and no call hangs."""
        if self._queue.state is State.DEAD:
            return False
        if self.model is None or self.busy_since is None:
            return True  # loading may take as long as a download takes
        return asyncio.get_running_loop().time() - self.busy_since < self._settings.watchdog_s

    async def _batch(self) -> None:
        """Take batches through the model, until cancelled."""
        while True:
            batch, switch = await self._next_batch()
            if batch:
                await self._step(batch)
            if switch is not None:
                self.model = switch.model
                await self._end_switch(switch)

    async def _generate(self) -> None:
        """Feed a model that answers token by token, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                model = self.model
                assert isinstance(model, Generator)
                generation = Generation(
                    model,
                    self._queue,
                    prepare=partial(self._stage, partial(prepare, model)),
                    restart=partial(self._restart, model),
                    places=self._settings.max_batch_size,
                )
                self._generations.add(generation)
                running = tasks.create_task(generation.run())
                switch = await generation.switch
                self.model = switch.model
                tasks.create_task(self._retire(model, generation, running, switch))

    async def _retire(
        self,
        model: Generator,
        generation: Generation,
        running: asyncio.Task[None],
        switch: Switch,
    ) -> None:
        """Wait until a model has generated all that it owes, and drop it."""
        await running
        self._generations.remove(generation)
        await self._call(model.close)
        del model, generation, running
        await self._end_switch(switch)

    async def _end_switch(self, switch: Switch) -> None:
        await self._call(switch.model.memory.reclaim)
        switch.done.set()

    async def _restart(self, model: Generator) -> None:
        outcome = await self._call(model.restart)
        if isinstance(outcome, BaseException):
            raise RuntimeError("the model cannot be made whole again") from outcome

    async def _load_model(self) -> Model | Generator:
        model: Model | Generator | BaseException = await self._call(self._load)
        if isinstance(model, BaseException):
            raise RuntimeError("loading failed") from model
        return model

    async def _step(self, batch: list[Entry]) -> None:
        """Take one batch through the model."""
        model = self.model
        assert model is not None
        assert not isinstance(model, Generator)
        started = asyncio.get_running_loop().time()
        split = partial(groups, max_tokens=self._settings.max_batch_tokens, pads=model.pads)
        prepared = _answer(await self._stage(partial(prepare_and_run, model, split), batch))
        for members in split([entry.value for entry in prepared]):
            _answer(await self._stage(partial(run, model), [prepared[i] for i in members]))
        ended = asyncio.get_running_loop().time()
        self._queue.record_drain(len(batch), ended - started)
        self._last = Batch(len(batch), ended - started, ended)
        self._batches += 1
        if self._batches % self._settings.memory_check_batches == 0:
            await self._call(model.memory.tidy)

    async def _next_batch(self) -> tuple[list[Entry], Switch | None]:
        """Wait for an input, then take what comes until the batch is full or its deadline passed.

        What is queued already is taken without waiting, also past the deadline: while the model
        was busy, the next batch has built itself. A client that is alone need not wait: where
        nobody joined the last batch, this one goes at once. And the clients of a large batch that
        was just answered are on their way back: until there are as many inputs as it had, a batch
        has a small share of its time more. Else 32 clients fall into batches of 1 and 31 in turns.

        A switch ends the batch; it is returned with it.
        """
        entry = await self._queue.take()
        if isinstance(entry, Switch):
            return [], entry
        batch = [entry]
        now = asyncio.get_running_loop().time
        deadline = expected_by = batch[0].enqueued_at
        if self._last.size != 1 and self._settings.batch_wait_ms:
            deadline += self._settings.batch_wait_ms / 1000
            return_s = min(RETURN_SHARE * self._last.taken_s, RETURN_MAX_S)
            expected_by = max(deadline, self._last.ended_at + return_s)
        with suppress(TimeoutError):
            while len(batch) < self.limit.size:
                until = expected_by if len(batch) < self._last.size else deadline
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

    async def _stage(
        self, function: Callable[[list[Any]], Staged], entries: list[Entry]
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
            function, [entry.value for entry in live]
        )
        if isinstance(outcome, Staged):
            self._metrics.count_call(outcome.cost)
            self.limit.recover()
            return list(_passed(live, outcome))
        reason = await self._reason(outcome, len(live))
        if len(live) > 1:
            self._metrics.batch_retries.inc()
            middle = len(live) // 2
            halves = live[:middle], live[middle:]
            return [entry for half in halves for entry in await self._stage(function, half)]
        logger.error("request %s: %s", live[0].request.id, reason, exc_info=outcome)
        live[0].refuse(ModelFailed(f"{reason} on this input"))
        return []

    async def _reason(self, error: BaseException, inputs: int) -> str:
        """Return why a batch failed; if memory was short, make room and keep batches smaller."""
        assert self.model is not None
        memory = self.model.memory
        if not memory.is_short(error):
            return "the model failed"
        self._metrics.out_of_memory.inc()
        self.limit.shrink(inputs)
        logger.warning("out of memory: batches have at most %d inputs for now", self.limit.size)
        await self._call(memory.release, error)
        return "the model ran out of memory"

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` in the model thread; return its result, or the exception it raised."""
        loop = asyncio.get_running_loop()
        self._call_started_at = loop.time()
        outcome = await loop.run_in_executor(self._thread, attempt, function, *arguments)
        self._call_started_at = None
        if isinstance(outcome, LoadError):
            raise outcome
        if isinstance(outcome, SystemExit | KeyboardInterrupt):
            raise RuntimeError("the model ended its thread") from outcome
        return outcome


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
