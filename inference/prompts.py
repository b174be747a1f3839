"""Prompts made ready for the engine: tokenised, measured, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from errors import Empty, Rejected, RequestError
from inference.sampling import Settings

SAMPLING = frozenset(Settings.__dataclass_fields__)
CHARACTERS_PER_TOKEN = 100  # more than any text has
USUAL_NEW_TOKENS = 100  # where neither the request nor its wire format says


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


class Prompts:
    """Makes prompts of what clients send; in the model thread.

    Args:
        tokenizer: Not used by anybody else.
        rules: For texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: Rules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules

    def prepare(
        self, inputs: Sequence[tuple[Any, Mapping[str, Any]]]
    ) -> list[Prompt | RequestError]:
        """Tokenise (input, parameters) pairs; a `RequestError` refuses one."""
        return [self._prepared(value, given) for value, given in inputs]

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

    def _check_length(self, characters: int) -> None:
        """Refuse, before it costs a second of tokenising, what is far too long.

        Raises:
            Rejected: So many characters are more tokens than the model can take.
        """
        most = self._rules.context * CHARACTERS_PER_TOKEN
        if characters > most:
            raise Rejected(
                f"the prompt has {characters} characters, and a context of {self._rules.context} "
                f"tokens holds {most} at most"
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
            self._check_length(len(value))
            tokens: list[int] = self._tokenizer(value)["input_ids"]
            return tokens
        if isinstance(value, Mapping):
            self._check_length(sum(len(message["content"]) for message in value["messages"]))
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
