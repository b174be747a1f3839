"""The OpenAPI 3.1 document: what this server does with the model that it has, and no more.

It is made of the models that validate the requests, so that it cannot say anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from api import endpoints
from api.answers import ANSWERS, Error, Status
from api.formats import TaskFormat
from api.openai import EmbeddingsBody
from api.openai_text import ChatBody, CompletionBody

REF = "#/components/schemas/{model}"
JSON = "application/json"
BINARY = {"schema": {"type": "string", "format": "binary"}}
EVENTS = {
    "text/event-stream": {
        "schema": {"type": "object", "properties": {"data": {"type": "string"}}}  # of each event
    }
}
Document: TypeAlias = dict[str, Any]

REASONS: Mapping[int, str] = {
    400: "The body is not JSON or not UTF-8, or there is no input.",
    401: "The API key is missing or wrong.",
    413: "More bytes or inputs than a request may have.",
    415: "A content type that this task has no use for.",
    422: "An input or a parameter that the model cannot take; it is named.",
    424: "The model failed on this input.",
    429: "The queue is full; see Retry-After.",
    500: "The server or its model ended while it was computing this.",
    503: "The queue is full, or the model is loading, or the server stops; see Retry-After.",
    504: "The deadline passed.",
}


@dataclass(frozen=True, slots=True)
class Served:
    """What there is to describe.

    Attributes:
        version: Of the server.
        task: None while the model is loading.
        format: Of the task.
        mask_token: Of the model, if it has one.
        chats: The model has a chat template.
        keyed: Inference asks for a key.
    """

    version: str
    task: str | None
    format: TaskFormat | None
    mask_token: str | None
    chats: bool
    keyed: bool


def document(served: Served) -> Document:
    """Return the document."""
    gets = {
        "/": _get("Name, version, model and links; a page to try it for browsers.", dict[str, Any]),
        "/livez": _get("Whether the worker makes progress.", Status, 503),
        "/readyz": _get("Whether a request would be admitted.", Status, 503),
        "/info": _get("Model, limits, state.", dict[str, Any]),
        "/v1/models": _get("The one model, for OpenAI's clients.", dict[str, Any]),
    }
    posts = _posts(served)
    components: Document = {"schemas": _schemas(served)}
    if served.keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for operation in (*posts.values(), gets["/v1/models"]):
            operation["security"] = [{"key": []}]
    paths: Document = {path: {"get": operation} for path, operation in gets.items()}
    for path, operation in posts.items():
        paths.setdefault(path, {})["post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": f"onequeue: {served.task or 'loading'}", "version": served.version},
        "paths": paths,
        "components": components,
    }


def _posts(served: Served) -> Document:
    """Return the operations that ask the model, by path."""
    if not (served.task and served.format):
        return {}
    examples = _examples(served.format, served.mask_token)
    inference = partial(_inference, served.task, served.format, examples)
    posts: Document = {path: inference(path) for path in endpoints.PREDICT}
    posts |= {path: _openai(path, summary, body) for path, summary, body in _openai_paths(served)}
    if served.task == "text-generation":
        body = _schema(served.format.body)
        posts |= {path: _generate(path, body, examples) for path in endpoints.GENERATE}
    return posts


def _schemas(served: Served) -> Document:
    """Return what the operations refer to, by name."""
    models: list[type[BaseModel]] = [Error, Status]
    models += [served.format.body] if served.format else []
    models += [body for _, _, body in _openai_paths(served)]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    found: Document = schemas["$defs"]
    return found | (_answers(served.task) if served.task else {})


def _get(summary: str, answer: Any, *statuses: int) -> Document:
    return {"summary": summary, "responses": _responses(_schema(answer), statuses)}


def _examples(task_format: TaskFormat, mask_token: str | None) -> Document:
    """Return the examples, with the mask as this model writes it."""
    text = json.dumps({title: {"value": body} for title, body in task_format.examples.items()})
    examples: Document = json.loads(text.replace("[MASK]", mask_token or "[MASK]"))
    return examples


def _inference(task: str, task_format: TaskFormat, examples: Document, path: str) -> Document:
    content = {JSON: {"schema": _schema(task_format.body), "examples": examples}}
    responses = _responses({"$ref": REF.format(model="Answers")}, REASONS)
    if "stream" in task_format.body.model_fields:
        responses["200"]["content"] |= EVENTS
    if task_format.speaks:
        responses["200"]["content"]["audio/wav"] = {
            "schema": {"type": "string", "format": "binary"}
        }
    return {
        "summary": f"{task}: one input or several.",
        "operationId": f"predict_{path.strip('/') or 'root'}",
        "parameters": [
            {
                "name": "X-Request-Timeout",
                "in": "header",
                "description": "Seconds that the client will wait.",
                "schema": {"type": "number", "minimum": 1},  # less is taken, and met by nobody
            }
        ],
        "requestBody": {"required": True, "content": content | _raw(task_format.raw)},
        "responses": responses,
    }


def _raw(kind: str) -> Document:
    """Return what a body may be that is the input as it stands, by content type.

    Args:
        kind: Of `TaskFormat.raw`.
    """
    if kind == "text":
        return {"text/plain": {"schema": {"type": "string", "minLength": 1}}}
    return {f"{kind}/*": BINARY, "application/octet-stream": BINARY} if kind else {}


def _openai_paths(served: Served) -> list[tuple[str, str, type[BaseModel]]]:
    """Return path, summary and body of what is served in the OpenAI wire format."""
    if served.task == "feature-extraction":
        embeddings = "Embeddings in the OpenAI wire format."
        return [(endpoints.EMBEDDINGS, embeddings, EmbeddingsBody)]
    if served.task != "text-generation":
        return []
    go_on = "Go on with a {}, in the OpenAI wire format."
    texts = (endpoints.COMPLETIONS, go_on.format("text"), CompletionBody)
    chats = (endpoints.CHAT, go_on.format("chat"), ChatBody)
    return [texts, chats] if served.chats else [texts]


def _openai(path: str, summary: str, body: type[BaseModel]) -> Document:
    responses = _responses({"type": "object"}, REASONS, error={"type": "object"})
    if body is not EmbeddingsBody:
        responses["200"]["content"] |= EVENTS
    return {
        "summary": summary,
        "operationId": path.removeprefix("/v1/").replace("/", "_"),
        "requestBody": {"required": True, "content": {JSON: {"schema": _schema(body)}}},
        "responses": responses,
    }


def _generate(path: str, body: Document, examples: Document) -> Document:
    """Describe text generation as Hugging Face's own clients know it."""
    answer = "events" if path.endswith("_stream") else "an object"
    responses = _responses({"type": "object"}, REASONS)
    responses["200"]["content"] |= EVENTS
    return {
        "summary": f"Go on with a text; the answer is {answer}.",
        "operationId": path.strip("/"),
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": body, "examples": examples}} | _raw("text"),
        },
        "responses": responses,
    }


def _responses(
    answer: Document, statuses: Iterable[int], error: Document | None = None
) -> Document:
    error = error or _schema(Error)
    responses = {"200": {"description": "The answer.", "content": {JSON: {"schema": answer}}}}
    for status in statuses:
        responses[str(status)] = {
            "description": REASONS[status],
            "content": {JSON: {"schema": error}},
        }
    return responses


def _schema(model: Any) -> Document:
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {"$ref": REF.format(model=model.__name__)}
    return TypeAdapter(model).json_schema()


def _answers(task: str) -> Document:
    """Return the schemas of an answer: to one input, to a list, or to Vertex AI."""
    if task not in ANSWERS:
        return {"Answers": {}}
    one = TypeAdapter(ANSWERS[task]).json_schema(ref_template=REF, mode="serialization")
    schemas: Document = one.pop("$defs", {})
    many = {"type": "array", "items": one}
    predictions = {
        "type": "object",
        "properties": {"predictions": many},
        "required": ["predictions"],
    }
    return {**schemas, "Answers": {"anyOf": [one, many, predictions]}}
