"""The OpenAI wire format: /v1/embeddings and /v1/models, and its shape of errors."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse
from starlette.responses import Response as HTTPResponse

from api.bodies import check_inputs, read_object, timing, to_json, validated
from api.formats import MANY, ONE, Strict, branch
from entries import Response
from errors import ModelFailed

PREFIX = "/v1/"
# The `type` of an error, by status; the official client raises a class of its own for each status.
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CREATED = 0  # unix time; nobody knows when the weights were made


class EmbeddingsBody(Strict):
    """The JSON body of POST /v1/embeddings."""

    input: Annotated[
        Annotated[str, Tag(ONE)] | Annotated[list[str], Field(fail_fast=True), Tag(MANY)],
        Discriminator(branch),
    ] = Field(description="A text or a list of texts; lists of token ids are not served.")
    model: str | None = Field(None, description="Not looked at: there is one model.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = Field(None, description="Ignored.")


def parse_embeddings(body: bytes, max_inputs: int) -> tuple[list[str], dict[str, Any], bool]:
    """Return the texts, the pipeline parameters, and whether vectors are wanted as base64.

    Raises:
        InvalidRequest: Of any kind; see `huggingface`.
    """
    parsed: EmbeddingsBody = validated(EmbeddingsBody, read_object(body))
    inputs = parsed.input if isinstance(parsed.input, list) else [parsed.input]
    check_inputs(inputs, max_inputs)
    parameters = {} if parsed.dimensions is None else {"dimensions": parsed.dimensions}
    return inputs, parameters, parsed.encoding_format == "base64"


def embeddings(responses: Sequence[Response], model_id: str, as_base64: bool) -> HTTPResponse:
    """Answer with the vectors, as numbers or as base64 of little-endian float32.

    Raises:
        ModelFailed: A number is not finite.
    """
    tokens = sum(response.tokens for response in responses)
    body = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": response.index,
                "embedding": _packed(response.output) if as_base64 else response.output,
            }
            for response in responses
        ],
        "model": model_id,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return HTTPResponse(to_json(body), headers=timing(responses), media_type="application/json")


def _packed(vector: Sequence[float]) -> str:
    array = np.asarray(vector, "<f4")
    if not np.isfinite(array).all():
        raise ModelFailed("the model's answer is not finite")
    return base64.b64encode(array.tobytes()).decode()


def models(model_id: str) -> JSONResponse:
    """List the one model."""
    return JSONResponse({"object": "list", "data": [_model(model_id)]})


def model(model_id: str) -> JSONResponse:
    """Tell of the one model."""
    return JSONResponse(_model(model_id))


def _model(model_id: str) -> Mapping[str, Any]:
    return {"id": model_id, "object": "model", "created": CREATED, "owned_by": "onequeue"}


def error_body(message: str, code: str, status: int) -> Mapping[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": ERROR_TYPES.get(status, kind), "param": None, "code": code}
    return {"error": error}
