"""The shape of a request and of its answer: what the formats of all tasks are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
)
from pydantic_core import PydanticCustomError

from errors import Empty, Rejected

WORD = 200  # characters
LABELS = 100  # candidates of one request, each a pass over the text
ONE, MANY, PAIR = "<one>", "<many>", "<pair>"


def branch(value: Any) -> str:
    """Name the branch of a union that `value` is for, so that errors speak of that branch alone."""
    if isinstance(value, list):
        return MANY
    return PAIR if isinstance(value, dict) else ONE


class Strict(BaseModel):
    """Knows every key, and takes no value for another."""

    model_config = ConfigDict(extra="forbid", strict=True)


Text = Annotated[str, Tag(ONE)]
Texts = Annotated[list[str], Field(fail_fast=True), Tag(MANY)]
OneOrMany = Annotated[Text | Texts, Discriminator(branch)]
Word = Annotated[str, Field(max_length=WORD)]
Labels = Annotated[
    Annotated[str, Field(min_length=1, max_length=20_000), Tag(ONE)]
    | Annotated[list[Word], Field(min_length=1, max_length=LABELS, fail_fast=True), Tag(MANY)],
    Discriminator(branch),
]


def label_list(value: str | list[str]) -> list[str]:
    """Return candidate labels as a list: as it was sent, or the parts of a string."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not 1 <= len(value) <= LABELS or not all(each.strip() for each in value):
        raise PydanticCustomError("labels", f"send 1 to {LABELS} labels, none of them blank")
    if any(len(each) > WORD for each in value):
        raise PydanticCustomError("labels", f"a label has at most {WORD} characters")
    return value


LabelList = Annotated[Labels, AfterValidator(label_list)]
# Other fields would let a client format at will: widths of gigabytes, attributes of objects.
Template = Annotated[str, Field(max_length=1000, pattern=r"^[^{}]*\{\}[^{}]*$")]


def exactly(value: Any) -> BeforeValidator:
    """Refuse what only equals `value`: false is no 0."""

    def check(given: Any) -> Any:
        if type(given) is not type(value):
            raise ValueError(f"only {json.dumps(value)} is served")
        return given

    return BeforeValidator(check)


One = Annotated[Literal[1], exactly(1)]
Zero = Annotated[Literal[0], exactly(0)]
Off = Annotated[Literal[False], exactly(False)]


def as_it_is(output: Any) -> Any:
    """Write an output as the pipeline does."""
    return output


def check_text(value: Any) -> None:
    """Refuse what no tokenizer should see: a text, or several by name.

    Raises:
        Empty: There is no visible character.
        Rejected: It holds a NUL.
    """
    for text in value.values() if isinstance(value, dict) else (value,):
        if not text.strip():
            raise Empty("the input is empty")
        if "\0" in text:
            raise Rejected("the input holds a NUL character")


@dataclass(frozen=True, slots=True)
class TaskFormat:
    """The wire format of a task.

    Attributes:
        body: Of a JSON request: inputs, parameters, options.
        wraps: A single input in JSON is answered with a list of one, as clients expect.
        write: Makes of an output what clients expect.
        nullable: Parameters for which null is a value.
        examples: Requests that show what it is good for, by title.
        raw: What a body is that is no JSON: text, image, audio, video; empty: nothing.
        check: Raises `InvalidRequest` for an input that need not come to the queue.
        speaks: The answer is a sound.
    """

    body: type[BaseModel]
    wraps: bool = False
    write: Callable[[Any], Any] = as_it_is
    nullable: frozenset[str] = frozenset()
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    raw: str = "text"
    check: Callable[[Any], None] = check_text
    speaks: bool = False


def body(name: str, inputs: Any, parameters: Any, *, flat: bool = False, **more: Any) -> Any:
    """Return the model of a JSON body.

    Args:
        name: In the OpenAPI document.
        inputs: Type of `inputs`.
        parameters: Type of `parameters`.
        flat: The fields of `parameters` may stand beside `inputs` too.
        more: Other fields, each as (type, default).
    """
    fields: dict[str, Any] = {
        "inputs": (inputs, ...),
        "parameters": (parameters, ...) if _required(parameters) else (parameters | None, None),
        "options": (Any, Field(None, description="Ignored; older clients send it.")),
        **more,
    }
    if flat:
        fields |= {
            field_name: (about.annotation, about)
            for field_name, about in parameters.model_fields.items()
        }
    return create_model(name, __base__=Strict, **fields)


def _required(parameters: type[BaseModel]) -> bool:
    return any(about.is_required() for about in parameters.model_fields.values())
