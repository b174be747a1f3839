"""Applications around fake models, for tests that need a real process.

    uvicorn --factory tests.apps:slow

BATCH_S is the time that a batch takes; each batch is written as a line of JSON to the file RAN.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from starlette.applications import Starlette

import heads
from config import Settings, load_settings
from server import create_app
from telemetry import configure_logging
from tests.fakes import FakeModel


def slow() -> Starlette:
    """Answer in upper case, BATCH_S seconds per batch; "die" ends the model thread, "hang" stops
    it for a minute.
    """
    batch_s = float(os.environ["BATCH_S"])
    ran = Path(os.environ["RAN"])

    def hook(texts: list[str]) -> None:
        with ran.open("a") as file:
            file.write(json.dumps(texts) + "\n")
        if "die" in texts:
            raise SystemExit
        if "hang" in texts:
            time.sleep(60)
        time.sleep(batch_s)

    settings = load_settings()
    configure_logging(settings)
    return create_app(settings, load=lambda _: FakeModel(hook))


def hurried() -> Starlette:
    """As `slow`, but the head of a request has a second."""
    heads.HEAD_S = 1.0
    return slow()


def stuck_loading() -> Starlette:
    """Never get ready."""

    def load(_: Settings) -> FakeModel:
        time.sleep(60)
        return FakeModel()

    return create_app(load_settings(), load)
