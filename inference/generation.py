"""A causal language model as the worker wants it (see `stages.Generator`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from errors import Empty, ModelFailed, Rejected, RequestError
from inference.detokenizing import Detokenizer, StopStrings
from inference.engine import Engine
from inference.sampling import Sampler, Settings
from stages import Generated, Output, Piece, Token

logger = logging.getLogger(__name__)

SAMPLING = frozenset(Settings.__dataclass_fields__)
USUAL_NEW_TOKENS = 100  # where neither the request nor its wire format says
Deliver: TypeAlias = Callable[[Piece | Output | RequestError], None]


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all texts.

    Attributes:
        context: Tokens that the model can take, prompt and answer together.
        cache: Tokens that the engine can keep, of all requests together.
        new: Tokens that an answer may have.
        ends: Tokens that end a text.
        defaults: How tokens are chosen where a request does not say.
    """

    context: int
    cache: int
    new: int
    ends: frozenset[int]
    defaults: Settings


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt and what is wanted of it.

    Attributes:
        tokens: At least one.
        text: As text, if it is to come back with the answer.
        most: New tokens.
        stop: Strings that end the text.
        settings: How tokens are chosen.
    """

    tokens: Sequence[int]
    text: str
    most: int
    stop: Sequence[str]
    settings: Settings


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
        self._tokenizer = tokenizer
        self._decode = decoding(deepcopy(tokenizer))  # `prepare` runs in another thread
        self._special = frozenset(tokenizer.all_special_ids)
        self._rules = rules
        self._numbers = count()
        self._running: dict[str, Run] = {}
        self._engine = engine(self._take)

    @property
    def broken(self) -> bool:
        """Whether nothing can be generated until `restart`."""
        return self._engine.broken

    @property
    def load(self) -> Mapping[str, int]:
        """How many requests run, and how full the cache is."""
        used, room = self._engine.cache_use()
        return {"running": len(self._running), "cache_used_tokens": used, "cache_tokens": room}

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
        return [self._prepared(value, given) for value, given in inputs]

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
        ended = run.tokens[-1].id in self._rules.ends
        generated = Generated(
            text="".join(token.text for token in run.tokens),
            finish="stop_sequence" if run.stops.met else "eos_token" if ended else "length",
            prompt_tokens=len(run.prompt.tokens),
            new_tokens=len(run.tokens),
            first_token_ms=run.first_token_ms,
            prompt=run.prompt.text,
            tokens=run.tokens if run.prompt.settings.logprobs is not None else (),
        )
        run.deliver(Output(generated, len(run.prompt.tokens)))

    def _token(self, run: Run, place: int, token: int, text: str) -> Token:
        special = token in self._special
        if run.prompt.settings.logprobs is None:
            return Token(token, text, special=special)
        logprob, best = run.sampler.logprobs[place]
        named = [(each, self._decode([each]), value) for each, value in best]
        return Token(token, text, logprob, named, special)

    def _prepared(self, value: Any, given: Mapping[str, Any]) -> Prompt | RequestError:
        try:
            return self._prompt(value, given)
        except RequestError as refusal:
            return refusal

    def _prompt(self, value: Any, given: Mapping[str, Any]) -> Prompt:
        tokens = self._tokens(value)
        if (kept := given.get("truncate")) is not None:
            tokens = tokens[-kept:]
        if not tokens:
            raise Empty("the prompt is empty")
        return Prompt(
            tokens=tokens,
            text=self._tokenizer.decode(tokens, skip_special_tokens=True)
            if given.get("return_full_text")
            else "",
            most=self._most(len(tokens), given),
            stop=given.get("stop") or (),
            settings=self._settings(given),
        )

    def _check_known(self, what: str, tokens: Iterable[int]) -> None:
        """Refuse what would break the engine for all.

        Raises:
            Rejected: A token is not in the vocabulary.
        """
        words = len(self._tokenizer)
        if any(not 0 <= token < words for token in tokens):
            raise Rejected(f"{what}: tokens are numbers from 0 to {words - 1}")

    def _settings(self, given: Mapping[str, Any]) -> Settings:
        """Return how tokens are chosen: as the request says, or else the model.

        Who names a filter and no temperature wants tokens to be drawn.
        """
        named = {name: given[name] for name in SAMPLING & given.keys()}
        self._check_known("logit_bias", named.get("bias", ()))
        if given.get("details"):
            named.setdefault("logprobs", 0)
        settings = replace(self._rules.defaults, **named)
        draws = given.get("do_sample")
        if "temperature" not in named and (named.get("top_k") or named.get("top_p", 1) < 1):
            draws = draws is not False
        if draws is None:
            return settings
        return replace(settings, temperature=(settings.temperature or 1.0) if draws else 0.0)

    def _tokens(self, value: Any) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            Rejected: The chat template takes offence, or a token is unknown.
        """
        if isinstance(value, str):
            tokens: list[int] = self._tokenizer(value)["input_ids"]
            return tokens
        if isinstance(value, Mapping):
            try:
                tokens = self._tokenizer.apply_chat_template(
                    value["messages"], add_generation_prompt=True, return_dict=False
                )
            except (TemplateError, TypeError, ValueError) as error:
                raise Rejected(f"messages: {' '.join(str(error).split())}") from None
            return tokens
        self._check_known("prompt", value)
        return list(value)

    def _most(self, prompt: int, given: Mapping[str, Any]) -> int:
        """Return how many tokens may be generated after a prompt of so many.

        Raises:
            Rejected: There is no room for what was asked.
        """
        rules = self._rules
        room = min(rules.context, rules.cache)
        what = "context" if rules.context <= rules.cache else "cache"
        usual = given.get("usual_new_tokens", USUAL_NEW_TOKENS)
        most: int = given.get("max_new_tokens", min(usual or rules.new, rules.new, room - prompt))
        if most > rules.new:
            raise Rejected(f"{most} new tokens asked for, and MAX_NEW_TOKENS is {rules.new}")
        if most < 1 or prompt + most > room:
            asked = max(most, 1)
            raise Rejected(
                f"{prompt} tokens of the prompt and {asked} new ones are {prompt + asked}, "
                f"and the {what} holds {room}"
            )
        return most


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
