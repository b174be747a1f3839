"""Model functions for tests: small, deterministic, and steered by events instead of sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from errors import Rejected, RequestError

Inputs = Sequence[tuple[Any, Mapping[str, Any]]]


@dataclass(frozen=True)
class FakePrepared:
    text: str
    tokens: int
    group: str


@dataclass
class FakeModel:
    """Answers each text in upper case; the words of a text are its tokens.

    "invalid" is rejected by prepare. `run_hook` sees every batch of texts before it is answered, in
    the model thread. `batches` holds what was run.
    """

    run_hook: Callable[[list[str]], None] = lambda texts: None
    batches: list[list[str]] = field(default_factory=list)
    pads: bool = True
    info: Mapping[str, Any] = field(
        default_factory=lambda: {"model_id": "fake", "task": "fill-mask"}
    )

    def prepare(self, inputs: Inputs) -> Sequence[FakePrepared | RequestError]:
        return [
            Rejected("not a valid text")
            if text == "invalid"
            else FakePrepared(text, len(text.split()), str(parameters.get("group", "")))
            for text, parameters in inputs
        ]

    def run(self, batch: Sequence[FakePrepared]) -> Sequence[Any]:
        texts = [prepared.text for prepared in batch]
        self.run_hook(texts)
        self.batches.append(texts)
        return [text.upper() for text in texts]


class Gate:
    """A run hook that holds every batch until opened, and tells when one has arrived."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def __call__(self, texts: list[str]) -> None:
        self.arrived.set()
        assert self.opened.wait(10)
