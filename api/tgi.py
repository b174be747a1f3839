"""The wire format of text generation that Hugging Face's inference clients speak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response as HTTPResponse

from api.bodies import timing, to_json
from api.formats import Off, One, Strict, Zero
from entries import Part, Response
from errors import RequestError
from model import Generated, Token

Stop = Annotated[str, Field(min_length=1, max_length=200)]


class GenerationParameters(Strict):
    """How a text goes on."""

    max_new_tokens: int | None = Field(None, ge=1, description="At most; by default 100.")
    do_sample: bool | None = Field(None, description="Draw tokens; else the likeliest comes.")
    temperature: float | None = Field(None, gt=0, le=100)
    top_k: int | None = Field(None, ge=0, description="Draw from so many; 0: from all.")
    top_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: list[Stop] | None = Field(None, max_length=16, description="The text ends before these.")
    return_full_text: bool | None = Field(None, description="The prompt too.")
    truncate: int | None = Field(None, ge=1, description="Keep so many tokens, the last ones.")
    details: bool | None = Field(None, description="Tell of each token.")
    best_of: One | None = None
    decoder_input_details: Off | None = None
    watermark: Off | None = None
    typical_p: None = None
    top_n_tokens: Zero | None = None
    grammar: None = None
    adapter_id: None = None


def generated(output: Generated) -> dict[str, Any]:
    """Write an answer."""
    answer: dict[str, Any] = {"generated_text": output.prompt + output.text}
    if output.tokens:
        answer["details"] = {
            "finish_reason": output.finish,
            "generated_tokens": output.new_tokens,
            "seed": None,
            "prefill": [],
            "tokens": [_token(token) for token in output.tokens],
        }
    return answer


def texts(output: Generated) -> list[dict[str, Any]]:
    """Write an answer as the pipeline does: a prompt has a list of texts, here of one."""
    return [generated(output)]


def one(responses: Sequence[Response]) -> HTTPResponse:
    """Answer with the one answer."""
    (response,) = responses
    body = to_json(generated(response.output))
    return HTTPResponse(body, headers=pace(responses), media_type="application/json")


def pace(responses: Sequence[Response]) -> dict[str, str]:
    """Return the headers that tell how an answer came: as `timing`, and token by token (ms)."""
    outputs: list[Generated] = [response.output for response in responses]
    firsts = [response.queue_ms + response.output.first_token_ms for response in responses]
    return {
        **timing(responses),
        "x-first-token-time": f"{max(firsts):.1f}",
        "x-time-per-token": f"{max(output.next_token_ms for output in outputs):.1f}",
    }


class Events:
    """One event for each token; the last one has the whole text (see `events.Dialect`)."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = defaultdict(int)
        self._last: dict[int, dict[str, Any]] = {}

    def opening(self) -> Iterable[Any]:
        """Return nothing."""
        return ()

    def part(self, part: Part) -> Iterable[Any]:
        """Return an event for each token; the very last one waits for the whole answer."""
        events = []
        for token in part.piece.tokens:
            self._counts[part.index] += 1
            number = self._counts[part.index]
            event = {"index": number, "token": _token(token), "generated_text": None}
            events.append(event | {"details": None})
        if part.piece.last:
            self._last[part.index] = events.pop()
        return events

    def end(self, response: Response) -> Iterable[Any]:
        """Return the last token, with the text and how it came to its end."""
        output: Generated = response.output
        last = self._last.pop(response.index)
        last["generated_text"] = output.prompt + output.text
        last["details"] = {
            "finish_reason": output.finish,
            "generated_tokens": output.new_tokens,
            "input_length": output.prompt_tokens,
            "seed": None,
        }
        return [last]

    def closing(self) -> Iterable[Any]:
        """Return nothing."""
        return ()

    def failure(self, error: RequestError) -> Any:
        """Return the error as other answers have it."""
        return {"error": str(error), "error_type": error.error_type}


def _token(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
    }
