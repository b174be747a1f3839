"""Applications around fake models, for tests that need a real process.

    uvicorn --factory tests.apps:slow

BATCH_S is the time that a batch takes, LOAD_S those that the first loads of a model take; no batch
ends before the file OPEN is there, if one is named. Each batch is written as a line of JSON to the
file RAN. LAST_CALL_S is that of `protocol`.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

import protocol
from config import Settings, load_settings
from server import create_app, load_pipeline
from telemetry import configure_logging
from tests.fakes import FakeModel


def slow() -> Starlette:
    """Answer in upper case, BATCH_S seconds per batch; "die" ends the model thread, "hang" stops
    it for a minute.
    """
    batch_s = float(os.environ["BATCH_S"])
    loads_s = map(float, os.environ.get("LOAD_S", "").split())
    opened = Path(os.environ.get("OPEN", "/"))
    ran = Path(os.environ["RAN"])

    def hook(texts: list[str]) -> None:
        with ran.open("a") as file:
            file.write(json.dumps(texts) + "\n")
        while not opened.exists():
            time.sleep(0.005)
        if "die" in texts:
            raise SystemExit
        if "hang" in texts:
            time.sleep(60)
        time.sleep(batch_s)

    def load(_: Settings) -> FakeModel:
        time.sleep(next(loads_s, 0))
        return FakeModel(hook)

    protocol.LAST_CALL_S = float(os.environ.get("LAST_CALL_S", protocol.LAST_CALL_S))
    settings = load_settings()
    configure_logging(settings)
    return create_app(settings, load)


def hurried() -> Starlette:
    """As `slow`, but the head of a request has a second."""
    protocol.HEAD_S = 1.0
    return slow()


SHORT_EVERY_S = 5.0


class Chaotic:
    """A model that fails on "poison", and now and then fails, stalls or runs out of memory."""

    # Of all, however often a model is loaded.
    draws = random.Random(1)
    short_at = 0.0

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, batch: Sequence[Any]) -> Sequence[Any]:
        if any("poison" in prepared.value for prepared in batch):
            raise RuntimeError("poisoned")
        draw = self.draws.random()
        if len(batch) > 1 and draw < 0.04:
            raise RuntimeError("a fault at random")
        if len(batch) > 1 and time.monotonic() >= Chaotic.short_at:
            Chaotic.short_at = time.monotonic() + SHORT_EVERY_S
            raise MemoryError
        if draw > 0.96:
            time.sleep(0.05)
        outputs: Sequence[Any] = self._model.run(batch)
        return outputs


def chaotic() -> Starlette:
    """Serve MODEL_ID as a `Chaotic` model."""
    settings = load_settings()
    configure_logging(settings)
    return create_app(settings, lambda wanted: Chaotic(load_pipeline(wanted)))


def stuck_loading() -> Starlette:
    """Never get ready."""

    def load(_: Settings) -> FakeModel:
        time.sleep(60)
        return FakeModel()

    return create_app(load_settings(), load)
