"""The OpenAI wire format of text generation: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from starlette.responses import Response as HTTPResponse

from api.bodies import check_inputs, read_object, to_json, validated
from api.formats import MANY, ONE, Off, One, Strict, branch
from api.openai import error_body
from api.tgi import Stop, pace
from entries import Part, Response
from errors import Empty, Rejected, RequestError
from stages import Generated, Token

MAX_MESSAGES = 4096
USUAL_NEW_TOKENS = 16  # of a completion
TOKENS, MANY_TOKENS = "<tokens>", "<many tokens>"
Tokens = Annotated[list[int], Field(fail_fast=True)]
FINISH = {"length": "length"}  # all else is "stop"


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
    user: str | None = Field(None, description="Ignored.")

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


class Writer:
    """Writes answers as /v1/completions has them, whole or as events (see `events.Dialect`).

    Args:
        request_id: Becomes part of the answer's id.
        model_id: Of the model.
        usage: A stream ends with the numbers of tokens.
    """

    prefix = "cmpl"
    whole, chunk = "text_completion", "text_completion"

    def __init__(self, request_id: str, model_id: str, *, usage: bool) -> None:
        self._id = f"{self.prefix}-{request_id}"
        self._model_id = model_id
        self._created = int(time.time())
        self._usage = usage
        self._responses: list[Response] = []

    def answer(self, responses: Sequence[Response]) -> HTTPResponse:
        """Answer with whole texts."""
        choices = [self._choice(response) for response in responses]
        body = self._body(self.whole, choices) | {"usage": _usage(responses)}
        return HTTPResponse(to_json(body), headers=pace(responses), media_type="application/json")

    def opening(self) -> Iterable[Any]:
        """Return what comes before the first piece."""
        return ()

    def part(self, part: Part) -> Iterable[Any]:
        """Return a chunk with a piece, unless nothing can be told of it yet."""
        tells = part.piece.text or part.piece.tokens[0].logprob is not None
        return [self._chunk(self._piece(part))] if tells else []

    def end(self, response: Response) -> Iterable[Any]:
        """Return a chunk that says why an answer ends."""
        self._responses.append(response)
        return [self._chunk(self._ending(response))]

    def closing(self) -> Iterable[Any]:
        """Return the numbers of tokens, if they are wanted."""
        if not self._usage:
            return ()
        return [self._body(self.chunk, []) | {"usage": _usage(self._responses)}]

    def failure(self, error: RequestError) -> Any:
        """Return an error as OpenAI's clients read it."""
        return error_body(str(error), error.error_type, 500)

    def _body(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        about = {"id": self._id, "object": kind, "created": self._created}
        return {**about, "model": self._model_id, "choices": choices}

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return self._body(self.chunk, [choice]) | ({"usage": None} if self._usage else {})

    def _choice(self, response: Response) -> dict[str, Any]:
        return {**self._ending(response), "text": response.output.text}

    def _piece(self, part: Part) -> dict[str, Any]:
        text = part.piece.text
        return {"index": part.index, "text": text, "logprobs": None, "finish_reason": None}

    def _ending(self, response: Response) -> dict[str, Any]:
        finish = FINISH.get(response.output.finish, "stop")
        return {"index": response.index, "text": "", "logprobs": None, "finish_reason": finish}


class ChatWriter(Writer):
    """Writes answers as /v1/chat/completions has them."""

    prefix = "chatcmpl"
    whole, chunk = "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterable[Any]:
        """Say who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk(choice)]

    def _choice(self, response: Response) -> dict[str, Any]:
        output: Generated = response.output
        return {
            "index": response.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": _logprobs(output.tokens),
            "finish_reason": FINISH.get(output.finish, "stop"),
        }

    def _piece(self, part: Part) -> dict[str, Any]:
        return {
            "index": part.index,
            "delta": {"content": part.piece.text},
            "logprobs": _logprobs(part.piece.tokens),
            "finish_reason": None,
        }

    def _ending(self, response: Response) -> dict[str, Any]:
        finish = FINISH.get(response.output.finish, "stop")
        return {"index": response.index, "delta": {}, "logprobs": None, "finish_reason": finish}


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any] | None:
    known = [token for token in tokens if token.logprob is not None]
    if not known:
        return None
    return {
        "content": [
            {
                **_named(token.text, token.logprob),
                "top_logprobs": [_named(text, value) for _, text, value in token.best],
            }
            for token in known
        ],
        "refusal": None,
    }


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(responses: Sequence[Response]) -> dict[str, int]:
    prompt = sum(response.output.prompt_tokens for response in responses)
    new = sum(response.output.new_tokens for response in responses)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
