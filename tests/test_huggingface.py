"""The Hugging Face wire format, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.bodies import read_object
from api.huggingface import Call, parse, respond
from api.tasks import FORMATS
from entries import Response
from errors import (
    Empty,
    Malformed,
    ModelFailed,
    Rejected,
    RequestError,
    TooLarge,
    UnsupportedType,
)

JSON = "application/json"


def parsed(body: bytes, content_type: str, task: str = "fill-mask") -> Call:
    return parse(body, content_type, max_inputs=4, task=FORMATS[task])


def parse_json(value: Any, task: str = "fill-mask") -> Call:
    return parsed(json.dumps(value).encode(), JSON, task)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/x-www-form-urlencoded",
        "text/plain",
        "text/plain; charset=utf-8",
        'TEXT/Markdown; charset="UTF-8"',
    ],
)
def test_text_is_the_input_as_it_stands(content_type: str) -> None:
    body = "a=1&b=%20 grün [MASK]".encode()
    assert parsed(body, content_type) == Call([body.decode()], {}, is_list=False)


def test_json_of_one_and_of_many() -> None:
    assert parse_json({"inputs": "a"}) == Call(["a"], {}, is_list=False)
    assert parse_json({"inputs": ["a"]}) == Call(["a"], {}, is_list=True)
    assert parse_json({"inputs": ["a", "b"], "parameters": None, "options": {"x": 1}}) == Call(
        ["a", "b"], {}, is_list=True
    )


def test_parameters_that_were_not_given_are_left_to_the_pipeline() -> None:
    given = {"top_k": 3, "targets": ["x"], "tokenizer_kwargs": {"truncation": True}}
    assert parse_json({"inputs": "a", "parameters": given}).parameters == given
    assert parse_json({"inputs": "a", "parameters": {"top_k": None}}).parameters == {}


@pytest.mark.parametrize(
    ("body", "content_type", "error", "text"),
    [
        (b"", "", Empty, "the input is empty"),
        (b" \n\t ", "", Empty, "the input is empty"),
        (b"\xff\xfe", "", Malformed, r"not UTF-8 \(byte 0\)"),
        (b"a\0b", "", Rejected, "NUL"),
        (b"a", "text/plain; charset=latin-1", UnsupportedType, "charset 'latin-1'"),
        (b"a", "image/png", UnsupportedType, "image/png"),
        (b"a", "multipart/form-data; boundary=x", UnsupportedType, "multipart/form-data"),
        (b"", JSON, Empty, "the body is empty"),
        (b"{", JSON, Malformed, "JSON"),
        (b'{"inputs": "\xff"}', JSON, Malformed, "JSON"),
        (b'{"inputs": "\\ud800"}', JSON, Malformed, "hex escape"),
        (b"[" * 100_000, JSON, Malformed, "recursion"),
        (b'{"inputs": ' + b"9" * 5000 + b"}", JSON, Malformed, "not JSON"),
        (b'"text"', JSON, Rejected, "body: .*object"),
        (b"{}", JSON, Rejected, "inputs: Field required"),
        (b'{"inputs": null}', JSON, Rejected, "inputs: "),
        (b'{"inputs": 5}', JSON, Rejected, "inputs: Input should be a valid string"),
        (b'{"inputs": ["a", 5]}', JSON, Rejected, r"inputs\[1\]: Input should be a valid string"),
        (b'{"inputs": [["a"]]}', JSON, Rejected, r"inputs\[0\]"),
        (b'{"inputs": []}', JSON, Empty, "inputs: the list is empty"),
        (b'{"inputs": ["a", " "]}', JSON, Empty, r"inputs\[1\]: the input is empty"),
        (b'{"inputs": [" "]}', JSON, Empty, "^the input is empty"),
        (b'{"inputs": "a", "one": 1}', JSON, Rejected, "^one: there is no such parameter"),
        (b'{"inputs": "\\u0000"}', JSON, Rejected, "NUL"),
        (b'{"inputs": ["1","2","3","4","5"]}', JSON, TooLarge, "5 inputs.* 4"),
        (
            b'{"input": "a", "inputs": "a"}',
            JSON,
            Rejected,
            "input: there is no such parameter; parameters go",
        ),
    ],
)
def test_bad_body_gets_its_own_error(
    body: bytes, content_type: str, error: type[RequestError], text: str
) -> None:
    with pytest.raises(error, match=text):
        parsed(body, content_type)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"top_k": 0}, "parameters.top_k: .* greater than or equal to 1"),
        ({"top_k": "5"}, "parameters.top_k: .* valid integer"),
        ({"top_k": True}, "parameters.top_k: .* valid integer"),
        ({"top_k": 2.5}, "parameters.top_k: .* valid integer"),
        ({"topk": 5}, "parameters.topk: there is no such parameter"),
        ({"a\nb": 5}, r"parameters\.'a\\nb': there is no such parameter"),
        ({"targets": 5}, "parameters.targets: .* valid string"),
        ({"targets": ["a"] * 1001}, "parameters.targets: .* at most 1000 items"),
        ({"targets": ["a", 5]}, r"parameters.targets\[1\]: .* valid string"),
        ({"tokenizer_kwargs": {"padding": "max_length"}}, "tokenizer_kwargs.padding: there is no"),
        ({"tokenizer_kwargs": {"max_length": 2}}, "parameters.tokenizer_kwargs.max_length"),
        ({"targets": "a" * 201}, "parameters.targets: .* at most 200 characters"),
        ({"targets": []}, "parameters.targets: .* at least 1 item"),
        ([], "parameters: "),
    ],
)
def test_bad_parameter_is_named(parameters: Any, text: str) -> None:
    with pytest.raises(Rejected, match=text) as rejection:
        parse_json({"inputs": "a", "parameters": parameters})
    assert "\n" not in str(rejection.value)


@pytest.mark.anyio
async def test_list_of_one_is_answered_with_a_list() -> None:
    response = Response(0, [{"score": 1.0}], 3, 1.04, 0, 2.0, 0, batch_size=3)
    listed = await respond(Call(["a"], {}, is_list=True), [response])
    single = await respond(Call(["a"], {}, is_list=False), [response])
    assert json.loads(bytes(listed.body)) == [[{"score": 1.0}]]
    assert json.loads(bytes(single.body)) == [{"score": 1.0}]
    assert listed.headers["x-queue-time"] == "1.0"
    assert listed.headers["x-inference-time"] == "2.0"
    assert listed.headers["x-batch-size"] == "3"


def nested() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.anyio
@pytest.mark.parametrize(
    "output", [[{"score": float("nan")}], b"\xff", {"a": object()}, "\ud800", nested()]
)
async def test_output_that_json_cannot_say_is_a_model_failure(output: Any) -> None:
    with pytest.raises(ModelFailed):
        await respond(Call(["a"], {}, is_list=False), [Response(0, output, 1, 0, 0, 0, 0, 1)])


def test_very_many_faults_are_not_collected_one_by_one() -> None:
    with pytest.raises(Rejected) as rejection:
        parsed(b'{"inputs": [' + b"1," * 500_000 + b"1]}", JSON)
    assert str(rejection.value) == "inputs[0]: Input should be a valid string"
    keys = ",".join(f'"k{number}":1' for number in range(100_000))
    for body in (f"{{{keys}}}", f'{{"parameters":{{{keys}}}}}'):
        with pytest.raises(Rejected, match="100000 keys in one object"):
            parsed(body.encode(), JSON)


def test_long_names_are_shortened() -> None:
    with pytest.raises(Rejected) as rejection:
        parse_json({"inputs": "a", "k y" * 100_000: 1})
    assert len(str(rejection.value)) < 300


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            b'{"inputs": "a", "options": {%s}}' % b",".join(b'"%d":1' % n for n in range(40)),
            "40 keys",
        ),
        (b'{"inputs": [%s]}' % b",".join([b"{}"] * 30_000), "lists and objects"),
    ],
)
def test_what_would_take_long_to_look_at_is_not(body: bytes, text: str) -> None:
    with pytest.raises(Rejected, match=text):
        read_object(body)


def test_texts_are_compared_by_one_vector_each() -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "pooling": "none"}
    with pytest.raises(Rejected, match=r"^parameters\.pooling: "):
        parse_json(body, "feature-extraction")


@pytest.mark.parametrize(
    "labels", [",".join("a" * 101), " , ", ["a"] * 101, [" "], ["a", ""], "b, " + "a" * 201]
)
def test_labels_are_bounded_however_they_are_sent(labels: Any) -> None:
    body = {"inputs": "a", "parameters": {"candidate_labels": labels}}
    with pytest.raises(Rejected, match=r"^parameters\.candidate_labels: "):
        parse_json(body, "zero-shot-classification")
