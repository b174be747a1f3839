"""The worker's other half, for models that answer token by token: prompts in, pieces out.

The path of a prompt::

    RequestQueue.next            still counted as waiting
      -> prepare                 [model thread] what the model cannot take is refused at once
      -> a free place            of MAX_BATCH_SIZE that the model generates for at a time
      -> Generator.start         its pieces and its end come back on the event loop
      -> request.responses       put_nowait into a queue that only this request reads

A request that is over, for whatever reason, stops its generation (`RequestQueue` sees to it). If
the model breaks, all that it generates for is refused, and it is made whole again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from entries import Entry, Switch
from errors import Interrupted, RequestError
from model import Generator, Output, Piece
from queueing import RequestQueue

logger = logging.getLogger(__name__)


class Generation:
    """Feeds a generating model from the queue.

    Args:
        model: Loaded.
        queue: With the requests.
        prepare: Takes entries through `model.prepare`; returns those that it did not refuse.
        restart: Makes a broken model whole.
        places: How many inputs the model may generate for at a time.

    Attributes:
        switch: Set when another model is to take what comes.
        waits_since: Since when the model owes a token, in `loop.time()` seconds; None: it does not.
    """

    def __init__(
        self,
        model: Generator,
        queue: RequestQueue,
        prepare: Callable[[list[Entry]], Awaitable[list[Entry]]],
        restart: Callable[[], Awaitable[None]],
        places: int,
    ) -> None:
        self.switch: asyncio.Future[Switch] = asyncio.get_running_loop().create_future()
        self.waits_since: float | None = None
        self._model = model
        self._queue = queue
        self._prepare = prepare
        self._restart = restart
        self._places = asyncio.Semaphore(places)
        self._ready: asyncio.Queue[Entry] = asyncio.Queue()
        self._broken = asyncio.Event()
        self._whole = asyncio.Event()
        self._whole.set()
        self._running: set[Entry] = set()
        self._ended_at = 0.0

    async def run(self) -> None:
        """Feed the model until a switch, and then until all before the switch have their answer."""
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._start_all(), name="start"),
                tasks.create_task(self._heal(), name="heal"),
            ]
            self.switch.set_result(await self._prepare_all())
            self._queue.start_admitting()  # the other model is whole, whatever this one is
            await self._ready.join()
            for helper in helpers:
                helper.cancel()

    async def _prepare_all(self) -> Switch:
        while isinstance(entry := await self._queue.next(), Entry):
            for prepared in await self._prepare([entry]):
                self._ready.put_nowait(prepared)
        return entry

    async def _start_all(self) -> None:
        while True:
            entry = await self._ready.get()
            await self._places.acquire()
            if self._model.broken:
                self._note_break()
            await self._whole.wait()
            if entry.is_wanted(asyncio.get_running_loop().time()):
                self._start(entry)
            else:
                self._free()

    def _start(self, entry: Entry) -> None:
        self._queue.begin(entry)
        entry.batch_size = len(self._running) + 1
        stop = self._model.start(entry.value, partial(self._deliver, entry), entry.request.streams)
        self._running.add(entry)
        entry.request.running[entry] = partial(self._stop, entry, stop)
        self._note_progress()

    def _stop(self, entry: Entry, stop: Callable[[], None]) -> None:
        """Stop generating for a request that is over."""
        stop()
        self._leave(entry)

    def _deliver(self, entry: Entry, event: Piece | Output | RequestError) -> None:
        """Take what the model has generated for an entry."""
        if isinstance(event, Piece):
            entry.send(event)
            self._note_progress()
            return
        self._leave(entry)
        if isinstance(event, Output):
            now = time.monotonic()
            entry.forward_s = now - entry.taken_at
            self._queue.record_drain(1, now - max(entry.taken_at, self._ended_at))
            self._ended_at = now
            self._queue.metrics.count_generated(event.value, entry.taken_at - entry.enqueued_at)
            entry.answer(event.value, event.tokens)
        elif self._model.broken:
            entry.refuse(Interrupted("the model broke and starts anew"))
            self._note_break()
        else:
            entry.refuse(event)

    def _note_break(self) -> None:
        self._whole.clear()
        self._broken.set()

    def _leave(self, entry: Entry) -> None:
        self._running.remove(entry)
        del entry.request.running[entry]
        self._free()
        self._note_progress()

    def _free(self) -> None:
        self._places.release()
        self._ready.task_done()

    def _note_progress(self) -> None:
        self.waits_since = asyncio.get_running_loop().time() if self._running else None

    async def _heal(self) -> None:
        while True:
            await self._broken.wait()
            logger.error("the model broke; it starts anew")
            if not self.switch.done():  # else another model takes what comes
                self._queue.suspend()
            try:
                await self._restart()
            except RuntimeError:
                if not self.switch.done():
                    raise
                logger.exception("the model before stays broken: who waits for it is refused")
            self._broken.clear()
            self._whole.set()
            if not self.switch.done():
                self._queue.start_admitting()
