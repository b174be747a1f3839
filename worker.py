"""The worker: the one owner of the model, and of the thread that it runs in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from batching import Batcher
from config import Settings
from entries import Switch
from errors import LoadError
from generating import Generation
from model import Generator, Model
from queueing import RequestQueue, State
from stages import attempt, prepare

logger = logging.getLogger(__name__)


class Worker:
    """The one owner of the model.

    Attributes:
        model: None until it is loaded.
        batcher: Takes batches through it.
    """

    def __init__(
        self,
        settings: Settings,
        queue: RequestQueue,
        load: Callable[[], Model | Generator],
    ) -> None:
        self.model: Model | Generator | None = None
        self._calls: dict[asyncio.Future[Any], float] = {}  # and when each began
        self._generations: set[Generation] = set()
        self._settings = settings
        self._queue = queue
        self._load = load
        self.batcher = Batcher(settings, queue, self._call)
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
        waits = [each.waits_since for each in self._generations]
        return min(
            (since for since in (*self._calls.values(), *waits) if since is not None), default=None
        )

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
            assert self.model is not None
            assert not isinstance(self.model, Generator)
            switch = await self.batcher.run(self.model)
            self._take(switch)
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
                    prepare=partial(self.batcher.stage, model, prepare),
                    restart=partial(self._restart, model),
                    places=self._settings.max_batch_size,
                )
                self._generations.add(generation)
                running = tasks.create_task(generation.run())
                switch = await generation.switch
                self._take(switch)
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

    def _take(self, switch: Switch) -> None:
        self.model = switch.model
        switch.taken.set()

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

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` in the model thread; return its result, or the exception it raised."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._thread, attempt, function, *arguments)
        self._calls[call] = loop.time()
        call.add_done_callback(self._calls.pop)
        outcome = await call
        if isinstance(outcome, LoadError):
            raise outcome
        if isinstance(outcome, SystemExit | KeyboardInterrupt):
            raise RuntimeError("the model ended its thread") from outcome
        return outcome
