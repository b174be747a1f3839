"""Generated text in the OpenAI wire format: whole, or as events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response as HTTPResponse

from api.bodies import to_json
from api.openai import error_body
from api.tgi import pace
from entries import Part, Response
from errors import RequestError
from model import Generated, Token

FINISH = {"length": "length"}  # all else is "stop"


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
                **_named(token.alone, token.logprob),
                "top_logprobs": [_named(text, value) for _, text, value in token.best],
            }
            for token in known
        ],
        "refusal": None,
    }


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    whole = "\N{REPLACEMENT CHARACTER}" not in text  # else half a character, whose bytes are lost
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _usage(responses: Sequence[Response]) -> dict[str, int]:
    prompt = sum(response.output.prompt_tokens for response in responses)
    new = sum(response.output.new_tokens for response in responses)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
