"""The OpenAI wire format of text generation: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from api.bodies import check_inputs, read_object, validated
from api.formats import MANY, ONE, Off, One, Strict, branch
from api.tgi import Stop
from errors import Empty, Rejected

MAX_MESSAGES = 4096
USUAL_NEW_TOKENS = 16  # of a completion
TOKENS, MANY_TOKENS = "<tokens>", "<many tokens>"
Tokens = Annotated[list[int], Field(fail_fast=True)]


def prompt_branch(value: Any) -> str:
    """Name the kind of a prompt by its first item."""
    first = value[0] if isinstance(value, list) and value else None
    kinds = {int: TOKENS, list: MANY_TOKENS}
    return kinds.get(type(first), branch(value))


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag(ONE)] | Annotated[list[TextPart], Field(fail_fast=True), Tag(MANY)],
        Discriminator(branch),
    ]
    name: str | None = None


class PlainText(Strict):
    """The format of an answer: text."""

    type: Literal["text"]


class StreamOptions(Strict):
    """What a stream holds."""

    include_usage: bool | None = Field(None, description="Numbers of tokens, at the end.")
    include_obfuscation: Off | None = None


class GenerationBody(Strict):
    """What both kinds of request have."""

    model: str | None = Field(None, description="Not looked at: there is one model.")
    max_tokens: int | None = Field(None, ge=1, description="New tokens at most.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="Draw from so many; 0: from all.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=300)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[Stop, Tag(ONE)]
            | Annotated[list[Stop], Field(max_length=16, fail_fast=True), Tag(MANY)],
            Discriminator(branch),
        ]
        | None
    ) = Field(None, description="The text ends before these.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: One | None = Field(None, description="Answers to a prompt: one.")
    user: str | None = Field(None, description="Ignored, like those below: they ask for nothing.")
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: Off | None = None

    @field_validator("logit_bias")
    @classmethod
    def _known_tokens(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (biases or {}).items():
            if not token.isdecimal() or len(token) > 9 or not -100 <= bias <= 100:
                raise ValueError("token ids as keys, values from -100 to 100")
        return biases


class ChatBody(GenerationBody):
    """The JSON body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, description="New tokens at most.")
    logprobs: bool | None = Field(None, description="Tell the probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And of so many others.")
    tools: list[Any] | None = Field(None, max_length=0, description="None are served.")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: PlainText | None = None


class CompletionBody(GenerationBody):
    """The JSON body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag(ONE)]
        | Annotated[list[str], Field(fail_fast=True), Tag(MANY)]
        | Annotated[list[int], Field(fail_fast=True), Tag(TOKENS)]
        | Annotated[list[Tokens], Field(fail_fast=True), Tag(MANY_TOKENS)],
        Discriminator(prompt_branch),
    ] = Field(description="A text, the ids of its tokens, or a list of such.")
    echo: Off | None = None
    best_of: One | None = None
    logprobs: None = None
    suffix: None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request.

    Attributes:
        inputs: At least one.
        parameters: For the model.
        streams: The answer is wanted in pieces.
        usage: A stream ends with the numbers of tokens.
    """

    inputs: Sequence[Any]
    parameters: Mapping[str, Any]
    streams: bool
    usage: bool


def parse_chat(body: bytes) -> Call:
    """Return what a chat asks for.

    Raises:
        InvalidRequest: Of any kind; see `huggingface`.
    """
    parsed: ChatBody = validated(ChatBody, read_object(body))
    messages = [_message(each) for each in parsed.messages]
    if not any(each["content"].strip() for each in messages):
        raise Empty("messages: they are all empty")
    parameters = {"usual_new_tokens": None, **_parameters(parsed)}  # as many as there is room for
    if parsed.max_completion_tokens is not None:
        parameters["max_new_tokens"] = parsed.max_completion_tokens
    if parsed.logprobs:
        parameters["logprobs"] = parsed.top_logprobs or 0
    elif parsed.top_logprobs:
        raise Rejected("top_logprobs: set logprobs to true")
    return _call(parsed, [{"messages": messages}], parameters)


def parse_completion(body: bytes, max_inputs: int) -> Call:
    """Return what a completion asks for.

    Raises:
        InvalidRequest: Of any kind; see `huggingface`.
    """
    parsed: CompletionBody = validated(CompletionBody, read_object(body))
    prompt: Any = parsed.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    check_inputs(prompt, max_inputs, _check_prompt)
    parameters = {"usual_new_tokens": USUAL_NEW_TOKENS, **_parameters(parsed)}
    return _call(parsed, prompt, parameters)


def _call(body: GenerationBody, inputs: Sequence[Any], parameters: Mapping[str, Any]) -> Call:
    options = body.stream_options
    if options and not body.stream:
        raise Rejected("stream_options: set stream to true")
    usage = bool(options and options.include_usage)
    return Call(inputs, parameters, bool(body.stream), usage)


def _message(message: Message) -> dict[str, str]:
    """Return a message as chat templates read it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    named = {"name": message.name} if message.name is not None else {}
    return {"role": message.role, "content": content, **named}


def _check_prompt(value: str | list[int]) -> None:
    if not value:
        raise Empty("the prompt is empty")


def _parameters(body: GenerationBody) -> dict[str, Any]:
    """Return the parameters that were given, in the words of the model."""
    names = {"temperature", "top_p", "top_k", "seed"} | {
        f"{kind}_penalty" for kind in ("repetition", "frequency", "presence")
    }
    parameters: dict[str, Any] = body.model_dump(include=names, exclude_none=True)
    if body.max_tokens is not None:
        parameters["max_new_tokens"] = body.max_tokens
    if body.logit_bias:
        parameters["bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.stop:
        parameters["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    return parameters
