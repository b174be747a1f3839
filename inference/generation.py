"""A causal language model as the worker wants it (see `model.Generator`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from errors import ModelFailed, RequestError
from inference.detokenizing import Detokenizer, StopStrings
from inference.engine import Engine
from inference.memory import DeviceMemory
from inference.prompts import Prompt, Prompts, Rules
from inference.sampling import Sampler
from model import Generated, Output, Piece, Token

logger = logging.getLogger(__name__)

SMOOTHING = 0.1  # weight of the newest answer in a running mean
Deliver: TypeAlias = Callable[[Piece | Output | RequestError], None]


@dataclass(slots=True)
class Run:
    """A prompt that the engine generates for.

    Attributes:
        pieces: Send them as they come.
        tokens: So far.
    """

    prompt: Prompt
    deliver: Deliver
    pieces: bool
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    started_at: float
    first_token_ms: float = 0.0
    tokens: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """What has been generated so far, of whole answers.

    Attributes:
        prompt_tokens: That came in.
        new_tokens: That went out.
        first_token_ms: From the start of a generation to its first token: a running mean.
        next_token_ms: From one token to the next: a running mean.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_ms: float = 0.0
    next_token_ms: float = 0.0

    def count(self, answer: Generated) -> None:
        """Count a whole answer."""
        self.prompt_tokens += answer.prompt_tokens
        self.new_tokens += answer.new_tokens
        self.first_token_ms = _smoothed(self.first_token_ms, answer.first_token_ms)
        if answer.new_tokens > 1:
            self.next_token_ms = _smoothed(self.next_token_ms, answer.next_token_ms)


def _smoothed(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value


class GenerationModel:
    """Prompts in, text out, as much at a time as the engine takes.

    Args:
        tokenizer: Not used by anybody else.
        engine: Makes the engine, given what takes its outputs.
        rules: For texts.
        about: Facts for /info.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        engine: Callable[[Callable[[Sequence[GenerationOutput]], None]], Engine],
        rules: Rules,
        about: Mapping[str, Any],
    ) -> None:
        self.info = about
        self.memory = DeviceMemory(about["device"])
        self._decode = decoding(deepcopy(tokenizer))  # `prepare` runs in another thread
        self._special = frozenset(tokenizer.all_special_ids)
        self._prompts = Prompts(tokenizer, rules)
        self._ends = rules.ends
        self._numbers = count()
        self._totals = Totals()
        self._running: dict[str, Run] = {}
        self._engine = engine(self._take)

    @property
    def broken(self) -> bool:
        """Whether nothing can be generated until `restart`."""
        return self._engine.broken

    @property
    def load(self) -> Mapping[str, float]:
        """How many requests run, how full the cache is, and what has been done so far."""
        used, room = self._engine.cache_use()
        now = {"running": len(self._running), "cache_used_tokens": used, "cache_tokens": room}
        return now | {name: round(value, 1) for name, value in asdict(self._totals).items()}

    def restart(self) -> None:
        """Make a broken engine whole again."""
        self._engine.restart()

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> Sequence[Prompt | RequestError]:
        """Tokenise prompts: texts, token ids, or {"messages"} of a chat.

        An empty prompt is refused, and one that leaves no room for the answer.
        """
        return self._prompts.prepare(inputs)

    def start(self, prompt: Prompt, deliver: Deliver, pieces: bool) -> Callable[[], None]:
        """Generate for `prompt`; return what stops it. A broken engine fails it at once."""
        request_id = str(next(self._numbers))
        run = Run(
            prompt,
            deliver,
            pieces,
            Sampler(prompt.settings, len(prompt.tokens)),
            Detokenizer(self._decode, prompt.tokens),
            StopStrings(prompt.stop),
            started_at=time.perf_counter(),
        )
        self._running[request_id] = run
        if not self._engine.add(request_id, prompt.tokens, prompt.most, run.sampler):
            asyncio.get_running_loop().call_soon(self._fail, request_id)
        return partial(self._stop, request_id)

    def _fail(self, request_id: str) -> None:
        if (run := self._running.pop(request_id, None)) is not None:
            run.deliver(ModelFailed("the model failed on this input"))

    def _stop(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def _take(self, outputs: Sequence[GenerationOutput]) -> None:
        """Take what the engine has generated, on the event loop."""
        for output in outputs:
            run = self._running.get(output.request_id)
            if run is None:
                continue  # stopped in the meantime
            if output.status is RequestStatus.FAILED or run.sampler.failed:
                logger.error("the engine failed: %s", output.error or "no finite numbers")
                self._engine.cancel(output.request_id)
                self._fail(output.request_id)
                continue
            if not run.tokens:
                run.first_token_ms = (time.perf_counter() - run.started_at) * 1000
            tokens = self._told(run, output)
            over = output.is_finished() or run.stops.met
            run.tokens += tokens
            if run.pieces:
                run.deliver(Piece(tokens, last=over))
            if over:
                self._end(run, output)

    def _told(self, run: Run, output: GenerationOutput) -> list[Token]:
        """Return the new tokens of a run with their texts, up to a stop string."""
        told: list[Token] = []
        new = output.generated_tokens[len(run.tokens) :]
        for left, token in zip(range(len(new))[::-1], new, strict=True):
            text = run.detokenizer.push(token)
            last = output.is_finished() and not left
            text = run.stops.push(text + run.detokenizer.end() if last else text)
            if last and not run.stops.met:
                text += run.stops.end()
            told.append(self._token(run, len(run.tokens) + len(told), token, text))
            if run.stops.met:
                break
        return told

    def _end(self, run: Run, output: GenerationOutput) -> None:
        """Deliver the whole answer."""
        del self._running[output.request_id]
        if not output.is_finished():
            self._engine.cancel(output.request_id)
        ended = run.tokens[-1].id in self._ends
        spent_ms = (time.perf_counter() - run.started_at) * 1000
        generated = Generated(
            text="".join(token.text for token in run.tokens),
            finish="stop_sequence" if run.stops.met else "eos_token" if ended else "length",
            prompt_tokens=len(run.prompt.tokens),
            new_tokens=len(run.tokens),
            first_token_ms=run.first_token_ms,
            next_token_ms=(spent_ms - run.first_token_ms) / max(1, len(run.tokens) - 1),
            prompt=run.prompt.text,
            tokens=run.tokens if run.prompt.settings.logprobs is not None else (),
        )
        self._totals.count(generated)
        run.deliver(Output(generated, len(run.prompt.tokens)))

    def _token(self, run: Run, place: int, token: int, text: str) -> Token:
        special = token in self._special
        if run.prompt.settings.logprobs is None:
            return Token(token, text, special=special)
        logprob, best = run.sampler.logprobs[place]
        named = [(each, self._decode([each]), value) for each, value in best]
        return Token(token, text, logprob, named, special, alone=self._decode([token]))


def decoding(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return what makes text of tokens: no special ones, no spaces taken away.

    Every other call is for one token alone, which a `Detokenizer` has as context; it is remembered.
    """
    whole: Callable[[Sequence[int]], str]
    if tokenizer.is_fast:
        whole = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    else:
        whole = partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    alone = cache(lambda token: whole([token]))  # as many as the vocabulary has
    return lambda tokens: alone(tokens[0]) if len(tokens) == 1 else whole(tokens)
