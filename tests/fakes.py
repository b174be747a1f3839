"""Model functions for tests: small, deterministic, and steered by events instead of sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from errors import ModelFailed, Rejected, RequestError
from model import Generated, Output, Piece, Spent, Token

Inputs = Sequence[tuple[Any, Mapping[str, Any]]]


@dataclass(frozen=True)
class FakePrepared:
    text: str
    tokens: int
    group: str


class FakeMemory:
    """Is short when told so with a MemoryError."""

    def __init__(self) -> None:
        self.released: list[BaseException] = []
        self.tidied = 0
        self.reclaimed = 0

    def usage(self) -> Mapping[str, float]:
        return {"gpu_memory_allocated_bytes": 7}

    def is_short(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def release(self, error: BaseException) -> None:
        self.released.append(error)

    def tidy(self) -> None:
        self.tidied += 1

    def reclaim(self) -> None:
        self.reclaimed += 1


@dataclass
class FakeModel:
    """Answers each text in upper case; the words of a text are its tokens.

    "invalid" is rejected by prepare. `run_hook` sees every batch of texts before it is answered, in
    the model thread. `batches` holds what was run.
    """

    run_hook: Callable[[list[str]], None] = lambda texts: None
    batches: list[list[str]] = field(default_factory=list)
    pads: bool = True
    memory: FakeMemory = field(default_factory=FakeMemory)
    spent: Spent = field(default_factory=lambda: Spent(0.0, 0))
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


@dataclass
class FakeGenerator:
    """Generates what a test says, on the event loop.

    "invalid" is rejected by prepare. `running` holds the prompts that are generated for and how to
    deliver to each, `stopped` those that were stopped, `restart_hook` runs in the model thread.
    """

    restart_hook: Callable[[], object] = lambda: None
    broken: bool = False
    running: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    closed: bool = False
    memory: FakeMemory = field(default_factory=FakeMemory)
    info: Mapping[str, Any] = field(
        default_factory=lambda: {"model_id": "fake", "task": "text-generation", "chat": True}
    )

    @property
    def load(self) -> Mapping[str, float]:
        return {"running": len(self.running)}

    def prepare(self, inputs: Inputs) -> Sequence[Any]:
        return [Rejected("too long") if value == "invalid" else value for value, _ in inputs]

    def start(
        self, prompt: Any, deliver: Callable[[Any], None], pieces: bool
    ) -> Callable[[], None]:
        if self.broken:
            asyncio.get_running_loop().call_soon(deliver, ModelFailed("broken"))
            return lambda: None
        key = str(prompt)
        self.running[key] = deliver

        def stop() -> None:
            self.stopped.append(key)
            del self.running[key]

        return stop

    def restart(self) -> None:
        self.restart_hook()
        self.broken = False

    def close(self) -> None:
        self.closed = True

    def say(self, prompt: str, text: str) -> None:
        """Deliver a piece."""
        self.running[prompt](Piece([Token(1, text)], last=False))

    def end(self, prompt: str, text: str) -> None:
        """Deliver the whole answer."""
        whole = Generated(text, "eos_token", 2, 3, first_token_ms=1.0, next_token_ms=1.0)
        self.running.pop(prompt)(Output(whole, 2))

    def fail(self, prompt: str) -> None:
        """Deliver an error."""
        self.running.pop(prompt)(ModelFailed("the model failed on this input"))
