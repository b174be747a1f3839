"""A text generation server whose engine breaks at a word; see `test_generation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from config import Settings, load_settings
from model import Generator, Model
from server import create_app
from telemetry import configure_logging


def breakable() -> Starlette:
    """Serve MODEL_ID; a step that has the token 7 in it raises while the file BREAKS is there."""
    settings = load_settings()
    configure_logging(settings)

    def load(_: Settings) -> Model | Generator:
        from inference.loading import load

        model: Any = load(settings)
        inner = model._engine._model
        forward = inner.forward

        def breaking(input_ids: Any, **arguments: Any) -> Any:
            if bool((input_ids == 7).any()) and Path(settings.model_id, "breaks").exists():
                raise MemoryError("no memory for this step")
            return forward(input_ids=input_ids, **arguments)

        inner.forward = breaking
        loaded: Generator = model
        return loaded

    return create_app(settings, load)
