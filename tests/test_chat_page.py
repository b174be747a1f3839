"""The chat page in a real browser: against a small random model, and against invented answers.

They need chromium on the path (Debian: apt-get install chromium), and are skipped without it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.processes import ROOT, Server, server
from tests.tiny_causal import saved_causal

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")

PAGE = ROOT / "web" / "chat.html"
FAKE = "http://onequeue.test/"  # never looked up: every request to it is answered here
INFO = {"model_id": "some/model", "state": "ready", "task": "text-generation", "chat": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = saved_causal(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    with server("server:app", tmp_path_factory.mktemp("server"), model_id=folder) as running:
        running.wait_until_ready()
        yield running


def stream(*texts: str, end: str = "stop") -> bytes:
    """Return the events of a chat's answer."""
    chunks: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": end}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": len(texts)}})
    return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in chunks)


def open_fake(
    page: Page, answer: bytes = b"", status: int = 200, headers: Any = None, **info: Any
) -> list[Request]:
    """Open the page before invented answers; return what it sends."""
    posts: list[Request] = []

    def serve(route: Route) -> None:
        if route.request.method == "POST":
            posts.append(route.request)
            route.fulfill(status=status, body=answer, headers=headers or {})
        elif route.request.url == FAKE + "info":
            route.fulfill(json={**INFO, **info})
        else:
            route.fulfill(path=PAGE)

    page.route("**/*", serve)
    page.goto(FAKE)
    expect(page.get_by_text("Ready")).to_be_visible()
    return posts


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_message_is_answered_and_measured(page: Page, running: Server) -> None:
    page.goto(running.url)
    expect(page.get_by_text("Ready")).to_be_visible()
    page.get_by_text("Parameters").click()
    page.get_by_label("Most new tokens").fill("12")
    say(page, "Hello")
    log = page.get_by_role("log")
    expect(log).to_contain_text("Hello")
    expect(log).to_contain_text("12 tokens")
    expect(log).to_contain_text("tokens/s")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_can_be_stopped_while_it_grows(page: Page, running: Server, how: str) -> None:
    page.goto(running.url)
    expect(page.get_by_text("Ready")).to_be_visible()
    page.get_by_text("Parameters").click()
    page.get_by_label("Most new tokens").fill("4000")
    say(page, "Hello")
    answer = page.locator(".turn.assistant")
    expect(answer).not_to_have_text("")
    assert running.gauges()[1] == 1
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answer).to_contain_text("Stopped")
    running.wait_until((0, 0))


def test_the_whole_conversation_is_sent_until_it_starts_again(page: Page) -> None:
    posts = open_fake(page, stream("Hi", " there"))
    say(page, "One")
    expect(page.get_by_role("log")).to_contain_text("Hi there")
    say(page, "Two")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    messages = (posts[1].post_data_json or {})["messages"]
    assert [each["content"] for each in messages] == ["One", "Hi there", "Two"]
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("log")).not_to_contain_text("One")
    say(page, "Three")
    expect(page.get_by_role("log")).to_contain_text("Hi there")
    assert len((posts[2].post_data_json or {})["messages"]) == 1


def test_shift_enter_breaks_the_line(page: Page) -> None:
    posts = open_fake(page, stream("ok"))
    page.get_by_role("textbox", name="Message", exact=True).fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert not posts
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("ok")
    assert (posts[0].post_data_json or {})["messages"][0]["content"] == "a\nb"


def test_parameters_reach_the_request_and_the_command(page: Page) -> None:
    posts = open_fake(page, stream("ok", end="length"))
    page.get_by_text("Parameters").click()
    for label, value in (("System message", "Be brief."), ("Temperature", "0.5"), ("Seed", "3")):
        page.get_by_label(label).fill(value)
    say(page, "it's me")
    expect(page.get_by_role("log")).to_contain_text("cut at its most tokens")
    body = posts[0].post_data_json or {}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 3, 256)
    assert "top_p" not in body


def test_the_command_gives_the_same_answer(page: Page, running: Server) -> None:
    page.goto(running.url)
    expect(page.get_by_text("Ready")).to_be_visible()
    page.get_by_role("textbox", name="Message", exact=True).fill("it's $HOME")
    page.get_by_text("The same from a shell").click()
    command = page.locator("#curl").inner_text().replace("curl -N", "curl -sN")
    answer = subprocess.check_output(["bash", "-c", command], text=True)
    assert answer.endswith("data: [DONE]\n\n")
    assert "it's $HOME" in command.replace("'\\''", "'")


def test_an_error_is_readable_and_the_message_is_not_lost(page: Page) -> None:
    error = {"error": {"message": "900 tokens and the context holds 512", "code": "validation"}}
    open_fake(page, json.dumps(error).encode(), status=422)
    say(page, "long")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("422 · validation")
    expect(alert).to_contain_text("the context holds 512")
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_have_value("long")


def test_an_error_within_an_answer_keeps_what_was_said(page: Page) -> None:
    error = {"error": {"message": "the deadline passed", "code": "timeout"}}
    first = b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
    open_fake(page, first + b"data: %s\n\n" % json.dumps(error).encode())
    say(page, "a")
    expect(page.get_by_role("log")).to_contain_text("Half")
    expect(page.get_by_role("alert")).to_contain_text("the deadline passed")


def test_a_refused_key_is_asked_for_and_sent(page: Page) -> None:
    error = {"error": {"message": "send the API key", "code": "unauthorized"}}
    posts = open_fake(page, json.dumps(error).encode(), status=401)
    say(page, "a")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_have_count(2)
    assert posts[1].headers["authorization"] == "Bearer secret"
    assert "secret" not in page.locator("#curl").inner_text()


def test_a_full_queue_says_when_to_come_back(page: Page) -> None:
    error = {"error": {"message": "the queue is full", "code": "overloaded"}}
    open_fake(page, json.dumps(error).encode(), 503, {"retry-after": "7"})
    say(page, "a")
    expect(page.get_by_role("alert")).to_contain_text("Try again in 7 s.")


def test_text_is_never_markup(page: Page) -> None:
    open_fake(page, stream("<img src=x onerror=alert(1)>", "<b>bold</b>"))
    say(page, "<i>me</i>")
    expect(page.get_by_role("log")).to_contain_text("<b>bold</b>")
    expect(page.get_by_role("log")).to_contain_text("<i>me</i>")
    assert page.locator("#talk :is(img, b, i)").count() == 0


def test_a_model_without_template_goes_on_with_a_text(page: Page) -> None:
    chunk = {"choices": [{"text": " upon a time"}]}
    posts = open_fake(page, b"data: %s\n\n" % json.dumps(chunk).encode(), chat=False)
    page.get_by_role("textbox", name="Text").fill("Once")
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("upon a time")
    assert posts[0].url == FAKE + "v1/completions"
    assert (posts[0].post_data_json or {})["prompt"] == "Once"


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_at_the_side(page: Page, width: int, scheme: Any) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.emulate_media(color_scheme=scheme)
    open_fake(page, stream("word " * 300, "x" * 300), model_id="a-rather-long-name/of-" + "a" * 60)
    say(page, "y" * 200)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_other_page_gives_way_once_the_model_is_known(page: Page) -> None:
    state = {"asked": 0}

    def serve(route: Route) -> None:
        if route.request.url == FAKE + "info":
            route.fulfill(json=INFO)
        else:
            state["asked"] += 1
            name = "playground.html" if state["asked"] == 1 else "chat.html"
            route.fulfill(path=Path(ROOT, "web", name))

    page.route("**/*", serve)
    page.goto(FAKE)
    expect(page.get_by_role("log")).to_be_visible()
