"""What a model is to the rest of the house, and the values that go between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from errors import RequestError


class Prepared(Protocol):
    """One input made ready for the model."""

    @property
    def tokens(self) -> int:
        """Length in tokens."""

    @property
    def group(self) -> str:
        """Inputs share a forward pass only within the same group."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the model answers to one input.

    Attributes:
        value: JSON-ready.
        tokens: Length of the input in tokens.
    """

    value: Any
    tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: In the vocabulary.
        text: What can be told of the text since the token before: whole characters, and nothing
            that may turn out to belong to a stop string.
        logprob: Natural logarithm of its probability, if it was asked for.
        best: The likeliest tokens in its place, as (id, text, logprob), if they were asked for.
        special: Belongs to no text; an end-of-sequence token, for one.
        alone: What it would be by itself, if probabilities were asked for; half a character shows
            as U+FFFD.
    """

    id: int
    text: str
    logprob: float | None = None
    best: Sequence[tuple[int, str, float]] = ()
    special: bool = False
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a model has generated since the last piece.

    Attributes:
        tokens: At least one.
        last: The whole answer follows.
    """

    tokens: Sequence[Token]
    last: bool

    @property
    def text(self) -> str:
        """What the tokens add to the text."""
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Generated:
    """The whole answer of a generating model to one prompt.

    Attributes:
        text: Up to a stop string, without it.
        finish: Why it ends: "length", "eos_token" or "stop_sequence".
        prompt: The prompt as text, if it was asked for.
        prompt_tokens: Length of the prompt.
        new_tokens: How many were generated.
        tokens: All of them, if they were asked for.
        first_token_ms: From the start of the generation to the first token.
        next_token_ms: From one token to the next, on average.
    """

    text: str
    finish: str
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    next_token_ms: float
    prompt: str = ""
    tokens: Sequence[Token] = ()


@dataclass(frozen=True, slots=True)
class Spent:
    """What a forward pass took.

    Attributes:
        forward_s: Seconds in the model itself.
        tokens: That it computed, padding included.
    """

    forward_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call in the model thread took; 0 where there was none of it.

    Attributes:
        prepare_s: To validate and tokenise.
        forward_s: In the model itself.
        finish_s: To write the answers.
        inputs: In the forward pass.
        tokens: Of these inputs.
        computed_tokens: Of the forward pass, padding included.
    """

    prepare_s: float = 0.0
    forward_s: float = 0.0
    finish_s: float = 0.0
    inputs: int = 0
    tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Staged:
    """What a call in the model thread made of its inputs.

    Attributes:
        results: One for each; a `RequestError` refuses it.
        cost: Of the call.
    """

    results: Sequence[Any]
    cost: Cost


class Memory(Protocol):
    """The memory of the device of a model. But for `usage`, called in the model thread."""

    def usage(self) -> Mapping[str, float]:
        """Return bytes by the name of their gauge."""

    def is_short(self, error: BaseException) -> bool:
        """Tell whether `error` says that there was not enough of it."""

    def release(self, error: BaseException) -> None:
        """Let go of what the call that ended in `error` still holds."""

    def tidy(self) -> None:
        """Give fragmented memory back; called between batches, now and then."""

    def reclaim(self) -> None:
        """Free what nobody refers to any more; called when a model was loaded or dropped."""


class Loaded(Protocol):
    """What every model has."""

    @property
    def info(self) -> Mapping[str, Any]:
        """JSON-ready facts for people; at least model_id and task."""

    @property
    def memory(self) -> Memory:
        """Of its device."""


class Model(Loaded, Protocol):
    """What the worker needs of a model. `prepare` and `run` are called in the model thread.

    Their result is as long as their argument. A `RequestError` in it refuses that input alone;
    if the call raises, the worker looks for the culprit by halving the batch.
    """

    @property
    def pads(self) -> bool:
        """Whether a batch costs as if each of its inputs were as long as the longest."""

    @property
    def spent(self) -> Spent:
        """What the last `run` took."""

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> Sequence[Prepared | RequestError]:
        """Validate and tokenise (input, parameters) pairs."""

    def run(self, batch: Sequence[Any]) -> Sequence[Any]:
        """Return the JSON-ready outputs for what `prepare` made, all of one group."""


@runtime_checkable
class Generator(Loaded, Protocol):
    """A model that answers token by token, many inputs at a time, in a thread of its own.

    `prepare` and `restart` are called in the model thread, `close` there or, when all ends, on the
    event loop, the rest on the event loop.
    """

    @property
    def load(self) -> Mapping[str, float]:
        """JSON-ready numbers: how much runs, how full the cache is, what has been done so far."""

    @property
    def broken(self) -> bool:
        """Whether nothing can be generated until `restart`."""

    def prepare(self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]) -> Sequence[Any]:
        """Validate and tokenise (input, parameters) pairs; a `RequestError` refuses one."""

    def start(
        self, prompt: Any, deliver: Callable[[Piece | Output | RequestError], None], pieces: bool
    ) -> Callable[[], None]:
        """Generate for what `prepare` made; return what stops it.

        Args:
            prompt: Of `prepare`.
            deliver: Gets pieces, then the one output or error; nothing after a stop.
            pieces: Whether there shall be pieces.

        In a broken model, the error comes at once.
        """

    def restart(self) -> None:
        """Make a broken model whole again."""

    def close(self) -> None:
        """End the model's thread."""
