"""Text generation, against a real server with a small random model, by the clients people use."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from huggingface_hub import AsyncInferenceClient, InferenceClient, constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Settings
from model import Generator
from server import load_pipeline
from tests.processes import server
from tests.servers import Server
from tests.threads import Load, serving
from tests.tiny_causal import saved_causal

CHAT_PATH = "/v1/chat/completions"
CHAT: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the client would not even speak to this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_causal(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[Server]:
    with serving(model_id=folder) as running:
        yield running


@pytest.fixture
def client(running: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


@cache
def untouched(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def generated(folder: str, tokens: list[int], most: int) -> list[int]:
    """Return what the untouched model generates."""
    model = untouched(folder)
    with torch.inference_mode():
        output = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=most)
    new: list[int] = output[0, len(tokens) :].tolist()
    return new


def post(running: Server, path: str, **body: Any) -> httpx.Response:
    return running.client.post(running.url + path, json=body)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    *data, done = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(each) for each in data]


def test_greedy_answers_are_those_of_the_untouched_model(running: Server, folder: str) -> None:
    rng = random.Random(1)
    prompts = [rng.choices(range(3, 600), k=rng.randint(1, 120)) for _ in range(64)]
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def ask(http: httpx.AsyncClient, prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 8 + len(prompt) % 40}
        reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            return await asyncio.gather(*(ask(http, prompt) for prompt in prompts))

    texts = asyncio.run(ask_all())
    for prompt, text in zip(prompts, texts, strict=True):
        expected = generated(folder, prompt, 8 + len(prompt) % 40)
        assert text == tokenizer.decode(expected, skip_special_tokens=True)


def test_streamed_text_is_the_text_at_once(running: Server) -> None:
    rng = random.Random(2)

    async def both(http: httpx.AsyncClient, prompt: list[int]) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 1.3, "seed": sum(prompt)}
        whole = await http.post("/v1/completions", json=body)
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
        pieces = [each["choices"][0]["text"] for each in events(streamed)]
        return whole.json()["choices"][0]["text"], "".join(pieces)

    async def all_of_them() -> list[tuple[str, str]]:
        prompts = [rng.choices(range(3, 600), k=rng.randint(1, 9)) for _ in range(200)]
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            return await asyncio.gather(*(both(http, prompt) for prompt in prompts))

    pairs = asyncio.run(all_of_them())
    assert [whole for whole, _ in pairs] == [streamed for _, streamed in pairs]
    assert len(set(pairs)) > 150


def test_chat_by_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=CHAT, max_tokens=12)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + answer.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=CHAT,
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == answer.usage
    assert len({each.id for each in chunks}) == 1


def test_completions_by_the_openai_client(client: openai.OpenAI) -> None:
    two = client.completions.create(model="any", prompt=["One", "Another"], max_tokens=5)
    assert [choice.index for choice in two.choices] == [0, 1]
    texts = [
        client.completions.create(model="any", prompt=prompt, max_tokens=5).choices[0].text
        for prompt in ("One", "Another")
    ]
    assert [choice.text for choice in two.choices] == texts
    pieces = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="any", prompt=["One", "Another"], max_tokens=5, stream=True
    ):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert list(pieces.values()) == texts


def test_the_hub_client_chats_and_generates(running: Server) -> None:
    client = InferenceClient(base_url=running.url)
    answer = client.chat_completion(CHAT, max_tokens=7)
    streamed = client.chat_completion(CHAT, max_tokens=7, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(pieces) == answer.choices[0].message.content
    text = client.text_generation("Once", max_new_tokens=7)
    assert "".join(client.text_generation("Once", max_new_tokens=7, stream=True)) == text
    detailed = client.text_generation("Once", max_new_tokens=7, details=True)
    assert detailed.generated_text == text
    assert detailed.details is not None
    assert detailed.details.finish_reason == "length"
    assert "".join(token.text for token in detailed.details.tokens) == text
    assert all(token.logprob < 0 for token in detailed.details.tokens)
    *_, last = client.text_generation("Once", max_new_tokens=7, details=True, stream=True)
    assert last.generated_text == text
    assert last.details is not None
    assert last.details.generated_tokens == last.index == 7
    full = client.text_generation("Once", max_new_tokens=7, return_full_text=True)
    assert full == "Once" + text

    async def ask() -> str:
        async with AsyncInferenceClient(base_url=running.url) as client:
            text: str = await client.text_generation("Once", max_new_tokens=7)
            return text

    assert asyncio.run(ask()) == text


def test_tokens_are_counted_and_timed(running: Server) -> None:
    before = running.get("/info").json()["generation"]
    answer = post(running, "/v1/completions", prompt=[5, 6, 7], max_tokens=4)
    usage = answer.json()["usage"]
    after = running.get("/info").json()["generation"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"] == 3
    assert after["new_tokens"] - before["new_tokens"] == usage["completion_tokens"]
    assert after["first_token_ms"] > 0
    first_ms, next_ms, total_ms = (
        float(answer.headers[f"x-{name}"])
        for name in ("first-token-time", "time-per-token", "total-time")
    )
    assert min(first_ms, next_ms) > 0
    assert first_ms + 3 * next_ms <= total_ms + 1
    assert after["running"] == 0


def test_curl_gets_the_pipelines_shape(running: Server) -> None:
    answer = json.loads(subprocess.check_output(["curl", "-s", "-d", "Once", running.url]))
    assert set(answer[0]) == {"generated_text"}
    both = post(running, "/", inputs=["Once", "Twice"], parameters={"max_new_tokens": 3}).json()
    assert [len(each) for each in both] == [1, 1]
    one = post(running, "/generate", inputs="Once", parameters={"max_new_tokens": 3}).json()
    assert one == both[0][0]
    streamed = events(
        post(running, "/generate_stream", inputs="Once", parameters={"max_new_tokens": 3})
    )
    assert streamed[-1]["generated_text"] == one["generated_text"]
    assert [each["index"] for each in streamed] == [1, 2, 3]


def test_stop_strings_never_reach_the_client(running: Server, client: openai.OpenAI) -> None:
    whole = client.completions.create(model="any", prompt="Once", max_tokens=40).choices[0].text
    stop = whole[12:15]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(model="any", prompt="Once", max_tokens=40, stop=stop)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model="any", prompt="Once", max_tokens=40, stop=[stop, "never"], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected
    tgi = post(
        running,
        "/generate",
        inputs="Once",
        parameters={"stop": [stop], "max_new_tokens": 40, "details": True},
    ).json()
    assert tgi["generated_text"] == expected
    assert tgi["details"]["finish_reason"] == "stop_sequence"
    assert "".join(token["text"] for token in tgi["details"]["tokens"]) == expected


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="any", prompt="Once", max_tokens=20, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_probabilities_are_told_when_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert len(token.top_logprobs) == 2
        assert token.token == token.top_logprobs[0].token
        whole = "\ufffd" not in token.token
        assert token.bytes == (list(token.token.encode()) if whole else None)


def test_what_asks_for_nothing_is_taken(running: Server) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "n": 1,
    }
    assert post(running, CHAT_PATH, messages=CHAT, max_tokens=2, **nothing).status_code == 200
    nulls = dict.fromkeys(nothing)
    assert post(running, CHAT_PATH, messages=CHAT, max_tokens=2, **nulls).status_code == 200


def test_the_model_tells_of_itself(client: openai.OpenAI, folder: str) -> None:
    assert client.models.retrieve(folder).id == folder
    with pytest.raises(openai.NotFoundError, match="the model here is"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": [99999]}, 422, "from 0 to 599"),
        ("/v1/completions", {"prompt": ["a", 3]}, 422, "prompt[1]"),
        ("/v1/completions", {"prompt": "x " * 400, "max_tokens": 400}, 422, "512"),
        ("/v1/completions", {"prompt": "a" * 60_000}, 422, "60000 characters"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 422, "MAX_NEW_TOKENS is 4096"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 422, "suffix"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 422, "echo"),
        ("/v1/completions", {"prompt": "a", "wings": 2}, 422, "wings"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 422, "n: "),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 422, "temperature"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 422, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"600": 1}}, 422, "from 0 to 599"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, 422, "stream"),
        ("/v1/chat/completions", {"messages": []}, 422, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": " "}]}, 400, "empty"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 422, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 422, "no tools"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{}]}, 422, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "modalities": []}, 422, "not served here"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 422, "logprobs"),
        ("/generate", {"inputs": " "}, 400, "empty"),
        ("/generate", {"inputs": ["a", "b"]}, 413, "2 inputs"),
        ("/generate", {"inputs": "a", "parameters": {"watermark": True}}, 422, "watermark"),
        ("/generate_stream", {"inputs": "x " * 600}, 422, "512"),
        ("/", {"inputs": ["a"], "stream": True}, 422, "one input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    running: Server, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    response = post(running, path, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in (error["message"] if path.startswith("/v1/") else error)


def test_an_image_in_a_message_is_refused_by_name(running: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": parts}]
    response = post(running, "/v1/chat/completions", messages=messages)
    assert response.status_code == 422
    assert "messages[0].content[1].type" in response.json()["error"]["message"]
    messages = [{"role": "user", "content": parts[:1]}]
    assert post(running, "/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200


def test_a_model_without_template_cannot_chat(tmp_path: Path) -> None:
    with serving(model_id=saved_causal(tmp_path, template=None)) as running:
        response = post(running, "/v1/chat/completions", messages=CHAT)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert "/v1/chat/completions" not in running.get("/openapi.json").json()["paths"]
        assert post(running, "/v1/completions", prompt="a").status_code == 200


def test_clients_that_leave_stop_their_generation(running: Server) -> None:
    endless = {"prompt": "a", "max_tokens": 500, "stream": True, "logit_bias": {"1": -100}}
    body = json.dumps(endless).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    before = running.get("/info").json()["generation"]["new_tokens"]  # of whole answers
    leaving = [running.connect() for _ in range(100)]
    for connection in leaving:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    wait_for(lambda: running.gauges()[1] == 100)
    for connection in leaving:
        connection.close()
    running.wait_until((0, 0))
    load = running.get("/info").json()["generation"]
    assert (load["running"], load["new_tokens"]) == (0, before)
    wait_for(lambda: running.get("/info").json()["generation"]["cache_used_tokens"] == 0)
    assert post(running, "/v1/completions", prompt="a", max_tokens=3).status_code == 200


def test_a_deadline_in_a_stream_is_told_as_the_last_event(tmp_path: Path) -> None:
    folder = saved_causal(tmp_path, max_position_embeddings=8192)
    with serving(model_id=folder, max_new_tokens=8000) as running:
        body = {"prompt": "a", "max_tokens": 8000, "stream": True, "logit_bias": {"1": -100}}
        response = running.client.post(
            running.url + "/v1/completions", json=body, headers={"x-request-timeout": "1.5"}
        )
        assert response.status_code == 200
        *pieces, last = [line[6:] for line in response.text.splitlines() if line]
        assert len(pieces) > 1
        assert json.loads(last)["error"]["code"] == "timeout"
        running.wait_until((0, 0))
        assert running.get("/info").json()["generation"]["running"] == 0


def breaking_at(token: int, breaks: threading.Event) -> Load:
    """Return what loads a model; a step that has `token` in it fails while `breaks` is set."""

    def load(settings: Settings) -> Generator:
        model: Any = load_pipeline(settings)
        inner = model._engine._model
        forward = inner.forward

        def breaking(input_ids: torch.Tensor, **arguments: Any) -> Any:
            if breaks.is_set() and bool((input_ids == token).any()):
                raise MemoryError("no memory for this step")
            return forward(input_ids=input_ids, **arguments)

        inner.forward = breaking
        loaded: Generator = model
        return loaded

    return load


def test_a_broken_engine_is_told_and_built_anew(folder: str) -> None:
    breaks = threading.Event()
    breaks.set()
    with serving(breaking_at(7, breaks), model_id=folder) as running:
        with ThreadPoolExecutor() as threads:
            innocent = threads.submit(
                post, running, "/v1/completions", prompt=[5] * 9, max_tokens=450
            )
            wait_for(lambda: running.get("/info").json()["generation"]["running"] == 1)
            culprit = post(running, "/v1/completions", prompt=[5, 7], max_tokens=3)
            assert culprit.status_code == 500
            assert innocent.result().status_code == 500  # nobody can tell whose fault it was
        breaks.clear()
        running.wait_until_ready()
        assert running.get("/livez").status_code == 200
        assert post(running, "/v1/completions", prompt=[5, 7], max_tokens=3).status_code == 200
        running.wait_until((0, 0))


def said(answer: httpx.Response) -> str:
    """Return the text of an answer, streamed or not."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer) if streamed else [answer.json()]
    return "".join(each["choices"][0]["text"] for each in chunks)


def test_sigterm_ends_what_is_generated_and_no_word_is_lost(folder: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with server("server:app", tmp_path, model_id=folder) as running:
        running.wait_until_ready()
        with ThreadPoolExecutor() as threads:
            answers = [
                threads.submit(
                    post,
                    running,
                    "/v1/completions",
                    prompt=[5, n],
                    max_tokens=200,
                    stream=n % 2 == 0,
                )
                for n in range(8, 16)
            ]
            wait_for(lambda: sum(each.done() for each in answers) + running.gauges()[1] == 8)
            assert running.stop() == 0
            for n, answer in enumerate(answers, 8):
                whole = tokenizer.decode(generated(folder, [5, n], 200), skip_special_tokens=True)
                assert said(answer.result()) == whole


def test_the_cache_is_as_large_as_stated_and_may_be_small(folder: str) -> None:
    with serving(model_id=folder, cache_tokens=256) as running:
        assert running.get("/info").json()["generation"]["cache_tokens"] == 256
        too_long = post(running, "/v1/completions", prompt=[5] * 100, max_tokens=200)
        assert too_long.status_code == 422
        assert "the cache holds 256" in too_long.json()["error"]["message"]
        with ThreadPoolExecutor(8) as threads:  # together they do not fit
            prompts = [[5, n] * 20 for n in range(8, 16)]
            texts = [
                answer.json()["choices"][0]["text"]
                for answer in threads.map(
                    lambda prompt: post(running, "/v1/completions", prompt=prompt, max_tokens=90),
                    prompts,
                )
            ]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for prompt, text in zip(prompts, texts, strict=True):
            assert text == tokenizer.decode(generated(folder, prompt, 90), skip_special_tokens=True)
