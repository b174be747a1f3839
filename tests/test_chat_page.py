"""The chat page in a real browser: against a small random model, and against invented answers.

They need chromium on the path (Debian: apt-get install chromium), and are skipped without it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Locator, Page, Request, Route, expect

from api.about import PAGE_HEADERS
from tests.processes import ROOT, server
from tests.servers import Server
from tests.threads import after, serving
from tests.tiny_causal import saved_causal

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")

PAGE = ROOT / "web" / "chat.html"
FAKE = "http://onequeue.test/"  # never looked up: every request to it is answered here
HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
MANY = "3000"  # tokens: they take seconds


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = saved_causal(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    with server("server:app", tmp_path_factory.mktemp("server"), model_id=folder) as running:
        running.wait_until_ready()
        yield running


def events(*pieces: str, end: Any = "stop") -> str:
    """Return a stream; its `end` is why it is over, or an event of that kind, or None: broken."""
    said: list[Any] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    if isinstance(end, str):
        said.append({"choices": [{"delta": {}, "finish_reason": end}]})
        said.append({"choices": [], "usage": {"completion_tokens": len(pieces)}})
    elif end:
        said.append(end)
    return "".join(f"data: {json.dumps(each)}\n\n" for each in said) + "data: [DONE]\n\n"


def open_fake(page: Page, *answers: str | int, **info: Any) -> list[Request]:
    """Open the page before invented answers: streams or, as a number, refusals; the last goes on.

    Returns:
        What the page sends.
    """
    posts: list[Request] = []
    about = {"model_id": "some/model", "state": "ready", "task": "text-generation", **info}

    def serve(route: Route) -> None:
        if route.request.method == "POST":
            posts.append(route.request)
            answer = answers[min(len(posts), len(answers)) - 1]
            if isinstance(answer, str):
                route.fulfill(body=answer, content_type="text/event-stream")
            else:
                refusal = {"error": {"message": "some reason", "code": "some_code"}}
                route.fulfill(status=answer, json=refusal, headers={"retry-after": "7"})
        elif route.request.url == FAKE + "info":
            route.fulfill(json=about)
        else:
            route.fulfill(path=PAGE, headers=PAGE_HEADERS)

    page.route("**/*", serve)
    page.goto(FAKE)
    return posts


def box(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def send(page: Page, text: str) -> None:
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    box(page).fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the end of the answer."""
    send(page, text)
    expect(page.locator(".note, .problem").last).to_be_visible()
    expect(page.locator("#run")).to_have_text("Send")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Model")


def said(page: Page) -> str:
    """Return the newest answer, without what is noted below it."""
    text: str = answers(page).last.evaluate("node => node.firstChild.data")
    return text


def set_parameter(page: Page, label: str, value: str) -> None:
    if not page.get_by_label(label).is_visible():
        page.get_by_text("Parameters", exact=True).click()
    page.get_by_label(label).fill(value)


def begin_long_answer(page: Page, running: Server) -> None:
    page.goto(running.url)
    set_parameter(page, "New tokens at most", MANY)
    send(page, "Hi")
    expect(answers(page)).not_to_have_text("")
    expect(page.locator("#run")).to_have_text("Stop")


def wait_until_nothing_runs(running: Server) -> None:
    deadline = time.monotonic() + 5  # the answer itself would take longer
    while running.get("/info").json()["generation"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.wait_until((0, 0))


def conversation(request: Request) -> list[tuple[str, str]]:
    assert request.post_data_json
    return [(each["role"], each["content"]) for each in request.post_data_json["messages"]]


def test_answer_grows_token_by_token_until_it_ends(page: Page, running: Server) -> None:
    page.goto(running.url)
    send(page, "Who are you?")
    expect(answers(page)).not_to_have_text("")
    lengths = {len(said(page))}
    while page.locator("#run").text_content() == "Stop":
        lengths.add(len(said(page)))
    assert len(lengths) > 5
    note = r"256 tokens · first after \d+ ms · \d+\.\d tokens/s · cut at the limit$"
    expect(answers(page)).to_contain_text(re.compile(note))
    expect(page.get_by_role("article", name="You")).to_have_text("Who are you?")
    expect(box(page)).to_have_value("")
    expect(page.locator("#spoken")).to_have_text(said(page), use_inner_text=False)


def test_next_message_sends_the_whole_conversation(page: Page, running: Server) -> None:
    page.goto(running.url)
    set_parameter(page, "System message", "Be brief.")
    set_parameter(page, "New tokens at most", "9")
    ask(page, "one")
    first = said(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "two")
    turns = [("user", "one"), ("assistant", first), ("user", "two")]
    assert conversation(sent.value) == [("system", "Be brief."), *turns]
    expect(answers(page)).to_have_count(2)


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stopped_answer_stays_and_its_generation_ends(
    page: Page, running: Server, way: str
) -> None:
    begin_long_answer(page, running)
    page.get_by_label("Seed").press("Enter")  # sends nothing, and stops nothing either
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text(re.compile("Stopped$"))
    wait_until_nothing_runs(running)
    kept = said(page)
    assert kept
    set_parameter(page, "New tokens at most", "2")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "go on")
    assert ("assistant", kept) in conversation(sent.value)


def test_new_chat_ends_the_answer_and_forgets_all(page: Page, running: Server) -> None:
    begin_long_answer(page, running)
    expect(page.locator("#hint")).to_be_hidden()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.locator("#hint")).to_be_visible()
    expect(box(page)).to_be_focused()
    wait_until_nothing_runs(running)
    set_parameter(page, "New tokens at most", "2")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Anew")
    assert conversation(sent.value) == [("user", "Anew")]


def test_enter_sends_and_shift_enter_breaks_the_line(page: Page) -> None:
    posts = open_fake(page, events("a"))
    box(page).press_sequentially("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert posts == []
    ask(page, box(page).input_value())
    assert conversation(posts[0]) == [("user", "one\ntwo")]
    ask(page, "")
    ask(page, " \n ")
    assert len(posts) == 1


def test_refused_message_says_why_and_waits_to_be_changed(page: Page, running: Server) -> None:
    page.goto(running.url)
    ask(page, "x " * 9000)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("422 · validation")
    expect(problem).to_contain_text("4096")
    expect(problem).to_contain_text(re.compile(r"Request \w+"))
    expect(box(page)).to_have_value("x " * 9000)
    set_parameter(page, "New tokens at most", "2")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "x")
    expect(problem).to_have_count(0)
    assert conversation(sent.value) == [("user", "x")]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"error": {"code": "timeout", "message": "no time is left"}}, "timeout.*no time is left"),
        (None, "The answer has no end"),
    ],
)
def test_answer_that_breaks_off_stays_and_says_so(page: Page, end: Any, told: str) -> None:
    open_fake(page, events("as far ", "as this", end=end))
    ask(page, "Hi")
    assert said(page) == "as far as this"
    expect(page.get_by_role("alert")).to_have_text(re.compile(f"Broken off.*{told}"))


def test_unreachable_server_is_told_and_the_message_is_not_lost(page: Page) -> None:
    open_fake(page, events("a"))
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("No answer")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    expect(box(page)).to_have_value("Hi")
    page.unroute("**/v1/**")
    ask(page, "Hi")
    expect(page.get_by_role("article")).to_have_text(["Hi", re.compile("^a1 token")])


def test_server_that_is_slow_to_answer_is_waited_for(page: Page) -> None:
    page.route(FAKE, lambda route: route.fulfill(path=PAGE, headers=PAGE_HEADERS))
    page.route("**/info", lambda _route: None)  # no answer
    page.goto(FAKE)
    box(page).fill("Hi")
    page.wait_for_timeout(1_000)
    expect(page.locator("#state")).to_have_text("Connecting")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "true")


def test_lost_server_is_noticed_and_found_again(page: Page) -> None:
    page.clock.install()
    open_fake(page, events("a"))
    expect(page.locator("#state")).to_contain_text("Ready")
    page.route("**/info", lambda route: route.abort())
    page.clock.run_for(5000)
    expect(page.locator("#state")).to_contain_text("Cannot be reached")
    box(page).fill("Hi")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "true")
    page.unroute("**/info")
    page.clock.run_for(2000)
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")


def test_key_is_asked_for_after_401_sent_and_never_shown(page: Page) -> None:
    posts = open_fake(page, 401, events("a"))
    expect(page.get_by_label("API key")).to_be_hidden()
    ask(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text("401 · some_codesome reason\nTry again in 7 s.")
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("1 token")
    assert posts[1].headers["authorization"] == "Bearer secret"
    curl = page.locator("#curl")
    expect(curl).to_contain_text('-H "Authorization: Bearer $API_KEY"')
    expect(curl).not_to_contain_text("secret")
    assert page.evaluate("localStorage.length") == 0


def test_parameters_reach_the_request(page: Page) -> None:
    posts = open_fake(page, events("a"))
    set_parameter(page, "Temperature", "0.7")
    set_parameter(page, "Top p", "0.9")
    set_parameter(page, "New tokens at most", "12")
    set_parameter(page, "Seed", "0")
    ask(page, "Hi")
    set_parameter(page, "New tokens at most", "")
    ask(page, "Hi")
    first, second = (dict(post.post_data_json or {}) for post in posts)
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 0, **streams}
    assert first.pop("messages") == [{"role": "user", "content": "Hi"}]
    assert first == {"max_tokens": 12, **drawn}
    assert "max_tokens" not in second


def test_curl_command_answers_the_same(page: Page, running: Server, tmp_path: Path) -> None:
    page.goto(running.url)
    set_parameter(page, "System message", "It's \\ a `system`.")
    set_parameter(page, "New tokens at most", "20")
    ask(page, "first")
    box(page).fill('It\'s a "$HOME" of\n\\ `music`: @grüße 🎻')
    command = page.locator("#curl").text_content()
    assert command
    ask(page, box(page).input_value())
    assert page.locator("#curl").text_content() == command  # of what was sent, until more is typed
    output = subprocess.check_output(["bash", "-c", command], cwd=tmp_path, text=True)
    chunks = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
    pieces = [each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"]]
    assert "".join(pieces) == said(page)


def test_page_of_a_loading_model_becomes_the_chat_page_and_goes_on_with_a_text(
    page: Page, tmp_path: Path
) -> None:
    opened = threading.Event()
    folder = saved_causal(tmp_path, template=None)
    with serving(after(opened), ready=False, model_id=folder) as running:
        page.goto(running.url)
        expect(page.get_by_role("heading", name="Answer")).to_be_visible()
        opened.set()
        expect(page.get_by_role("log")).to_be_attached(timeout=60_000)
        expect(page.locator("#hint")).to_contain_text("no chat template")
        page.get_by_label("Text", exact=True).fill("Once")
        expect(page.locator("#curl")).to_contain_text('{"prompt":"Once",')
        with page.expect_request("**/v1/completions") as sent:
            page.keyboard.press("Enter")
        assert (sent.value.post_data_json or {})["prompt"] == "Once"
        expect(answers(page)).to_contain_text("256 tokens")
        assert said(page)
        page.get_by_role("button", name="Clear").click()
        expect(page.get_by_role("article")).to_have_count(0)


def test_html_is_shown_as_text(page: Page) -> None:
    open_fake(page, events(HOSTILE), model_id=HOSTILE, architecture=HOSTILE)
    ask(page, HOSTILE)
    turns = page.get_by_role("article")
    expect(turns).to_have_text([HOSTILE, re.compile(re.escape(HOSTILE))])
    expect(page.locator("#talk :is(img, script), .title :is(img, script)")).to_have_count(0)
    assert page.title() not in ("1", "2")


def test_page_asks_no_other_host(page: Page, running: Server) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(running.url)
    set_parameter(page, "New tokens at most", "3")
    ask(page, "Hi")
    hosts = {urlsplit(url).netloc for url in asked if not url.startswith("data:")}
    assert hosts == {urlsplit(running.url).netloc}


def test_keyboard_alone_is_enough(page: Page) -> None:
    posts = open_fake(page, events("a"))

    def tab_to(node: Locator, key: str = "Tab") -> None:
        while not node.evaluate("node => node === document.activeElement"):
            page.keyboard.press(key)

    expect(box(page)).to_be_focused()
    tab_to(page.get_by_role("button", name="Write a short poem"), "Shift+Tab")
    page.keyboard.press("Enter")
    tab_to(page.get_by_text("Parameters", exact=True))
    page.keyboard.press("Enter")
    tab_to(page.get_by_label("Temperature"))
    page.keyboard.type("1.5")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("1 token")
    assert (posts[0].post_data_json or {})["temperature"] == 1.5
    tab_to(page.get_by_role("button", name="New chat"), "Shift+Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("article")).to_have_count(0)


def test_everything_has_a_role_and_a_name(page: Page) -> None:
    open_fake(page, events("an answer"), api_key_required=True)
    ask(page, "Hi")
    set_parameter(page, "Seed", "1")
    seen = page.locator("main").aria_snapshot()
    fields = ("System message", "API key", "Message")
    assert all(f'textbox "{name}"' in seen for name in fields)
    numbers = ("Temperature", "Top p", "New tokens at most", "Seed")
    assert all(f'spinbutton "{name}"' in seen for name in numbers)
    assert all(f'button "{name}"' in seen for name in ("Send", "New chat"))
    assert 'log "Conversation"' in seen
    assert 'article "You": Hi' in seen
    assert 'article "Model": an answer' in seen


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(part * share for part, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    open_fake(page, events("a", end={"error": {"code": "b", "message": "c"}}))
    ask(page, "Hi")
    style = "(node, name) => getComputedStyle(node)[name]"
    backs = {"html": "#limits", ".turn.user": ".turn.user", ".problem": ".problem strong"}
    for back, text in (*backs.items(), ("html", ".turn.assistant"), (".box", ".hint")):
        colours = (
            page.locator(back).evaluate(style, "backgroundColor"),
            page.locator(text).evaluate(style, "color"),
        )
        dark, light = sorted(luminance(colour) for colour in colours)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (back, text)
    page_is_dark = luminance(page.locator("html").evaluate(style, "backgroundColor")) < 0.2
    assert page_is_dark == (scheme == "dark")


def test_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_fake(page, events("x" * 99), 500, model_id="a/" + "x" * 99, api_key_required=True)
    ask(page, "x" * 99)
    ask(page, "y" * 99)
    for name in ("Parameters", "The same from a shell"):
        page.get_by_text(name, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        dock = page.locator("#form").bounding_box()
        assert dock
        assert dock["height"] < 640  # some of the conversation is still to be seen
        page.evaluate("() => new Promise(requestAnimationFrame)")
        assert page.evaluate("innerHeight + scrollY - document.body.scrollHeight") > -1


def test_answer_does_not_pull_down_who_reads_further_up(page: Page, running: Server) -> None:
    page.set_viewport_size({"width": 600, "height": 500})
    page.goto(running.url)
    ask(page, "one")
    send(page, "two")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).not_to_have_text("")
    assert page.evaluate("scrollY") > 0
    page.evaluate("scrollTo(0, 0)")
    expect(page.locator(".note")).to_have_count(2)
    assert page.evaluate("scrollY") == 0


def test_answer_without_text_is_an_answer(page: Page) -> None:
    posts = open_fake(page, events(), events("a"))
    ask(page, "Hi")
    expect(page.get_by_role("article")).to_have_text(["Hi", "0 tokens · no text"])
    ask(page, "Well?")
    assert conversation(posts[1]) == [("user", "Hi"), ("assistant", ""), ("user", "Well?")]
