"""Another model in place of the one that serves, without a request lost.

The new model is loaded, proved and warmed up in a thread of its own while the other one answers.
Then a mark goes onto the queue: what was admitted before it is answered by the old model, what
comes after it by the new one, and the old one is dropped. Until then both are in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from config import Settings
from entries import Switch
from errors import Conflict, LoadError, Rejected, RequestError
from model import Generator, Model
from queueing import RequestQueue
from stages import attempt
from worker import Worker

logger = logging.getLogger(__name__)

# What /info says: loading; answering what comes, while the model before answers what came before.
LOADING, TAKING_OVER = "loading", "taking over"


class Reloader:
    """Loads models in place of the one that serves, one at a time.

    Args:
        settings: Name the model that is loaded unless another is asked for.
        queue: Of the requests.
        worker: With the model that serves.
        load: Returns the model that settings name.
    """

    def __init__(
        self,
        settings: Settings,
        queue: RequestQueue,
        worker: Worker,
        load: Callable[[Settings], Model | Generator],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._worker = worker
        self._load = load
        self._task: asyncio.Task[Mapping[str, Any]] | None = None
        self._hangup: asyncio.Task[None] | None = None  # else nothing would refer to it
        self._progress: dict[str, Any] = {}
        self._started_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a model is on its way."""
        return self._task is not None and not self._task.done()

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the last reload has come to, JSON-ready; nothing if there was none."""
        if self.busy:
            return {**self._progress, "seconds": round(time.monotonic() - self._started_at, 1)}
        return self._progress

    async def reload(
        self, model_id: str | None = None, revision: str | None = None
    ) -> Mapping[str, Any]:
        """Load a model and let it answer what is admitted from then on; return what was done.

        To cancel the wait does not stop the reload.

        Args:
            model_id: Hub id or folder; None: that of the settings.
            revision: Of a hub model; None: without a `model_id` that of the settings.

        Raises:
            Conflict: Another one is on its way.
            NotServing: There is no model yet, or the server is stopping.
            Rejected: The model cannot be loaded, or not for this task; the old one serves on.
        """
        self._queue.check_serving()
        if self.busy:
            what = "is loading" if self._progress["state"] == LOADING else "takes over"
            raise Conflict(f"model {self._progress['model_id']!r} {what}: wait until that is done")
        assert self._worker.model is not None
        update = {"task": self._worker.model.info["task"]}
        if model_id or revision:
            update |= {"model_id": model_id or self._settings.model_id, "revision": revision}
        wanted = self._settings.model_copy(update=update)
        self._started_at = time.monotonic()
        self._progress = {
            "model_id": wanted.model_id,
            "revision": wanted.revision,
            "state": LOADING,
        }
        self._task = asyncio.create_task(self._reload(wanted), name="reload")
        return await asyncio.shield(self._task)

    async def _reload(self, wanted: Settings) -> Mapping[str, Any]:
        logger.info("loading model %r beside the one that serves", wanted.model_id)
        try:
            model = await self._loaded(wanted)
        except Rejected as error:
            logger.error("reload: %s", error)
            self._end("failed", reason=str(error))
            raise
        switch = Switch(model)
        self._queue.switch(switch)
        await switch.taken.wait()
        logger.info("model %r answers what comes now", wanted.model_id)
        self._progress["state"] = TAKING_OVER
        await switch.done.wait()
        logger.info("the model before has ended")
        self._end("done")
        return self._progress

    async def _loaded(self, wanted: Settings) -> Model | Generator:
        thread = ThreadPoolExecutor(1, "standby")
        model: Any = await asyncio.get_running_loop().run_in_executor(
            thread, attempt, self._load, wanted
        )
        thread.shutdown(wait=False)
        if isinstance(model, BaseException):
            known = isinstance(model, LoadError)
            text = str(model) if known else f"cannot load model {wanted.model_id!r}"
            raise Rejected(text) from model
        loaded: Model | Generator = model
        return loaded

    def on_hangup(self) -> None:
        """Load the model of the settings anew."""

        async def reload() -> None:
            try:
                await self.reload()
            except RequestError as error:
                logger.warning("SIGHUP: %s", error)

        self._hangup = asyncio.create_task(reload())

    def _end(self, outcome: str, **facts: str) -> None:
        seconds = round(time.monotonic() - self._started_at, 1)
        self._progress |= {"state": outcome, "seconds": seconds, **facts}
        self._queue.metrics.reloads.labels(outcome).inc()
