"""The playground page in a real browser: against the bundled model, and against invented answers.

They need chromium on the path (Debian: apt-get install chromium), and are skipped without it.
"""

from __future__ import annotations

import base64
import json
import shlex
import shutil
import struct
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, Request, Route, expect

from tests.models import assert_same
from tests.processes import ROOT
from tests.servers import Server

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")

PAGE = ROOT / "web" / "playground.html"
FAKE = "http://onequeue.test/"  # never looked up: every request to it is answered here
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; media-src blob: data:"
)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


WIDTH, HEIGHT = 200, 100
BLACK = zlib.compress(bytes((1 + WIDTH) * HEIGHT))
PNG = b"\x89PNG\r\n\x1a\n" + b"".join(
    [
        chunk(b"IHDR", struct.pack(">2I5B", WIDTH, HEIGHT, 8, 0, 0, 0, 0)),
        chunk(b"IDAT", BLACK),
        chunk(b"IEND", b""),
    ]
)
PHOTO = "it's a photo.png"


def open_fake(
    page: Page,
    info: Mapping[str, Any],
    answer: Any = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> list[Request]:
    """Open the page before invented answers, under the strictest policy; return what it sends."""
    posts: list[Request] = []

    def serve(route: Route) -> None:
        if route.request.method == "POST":
            posts.append(route.request)
            said = {"content-type": "application/json", **(headers or {})}
            route.fulfill(status=status, body=json.dumps(answer), headers=said)
        elif route.request.url == FAKE + "info":
            route.fulfill(json={"model_id": "some/model", "state": "ready", **info})
        else:
            route.fulfill(path=PAGE, headers={"content-security-policy": POLICY})

    page.route("**/*", serve)
    page.goto(FAKE)
    return posts


def run(page: Page) -> None:
    """Press Ctrl+Enter and wait for the answer."""
    expect(page.locator("#run")).to_have_text("Run")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#raw:not([hidden]), #problem:not([hidden])")).to_be_visible()
    expect(page.locator("#run")).to_have_text("Run")


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def sent_json(request: Request) -> Any:
    return request.post_data_json


def sh(command: str, folder: Path) -> Any:
    return json.loads(subprocess.check_output(["sh", "-c", command], cwd=folder))


def choose_photo(page: Page) -> None:
    photo: FilePayload = {"name": PHOTO, "mimeType": "image/png", "buffer": PNG}
    page.set_input_files("[name=file]", [photo])


def test_text_typed_and_run_shows_bars_timings_and_a_curl_line_that_answers_the_same(
    page: Page, bundled: Server, tmp_path: Path
) -> None:
    page.goto(bundled.url)
    page.get_by_label("Text").fill('It\'s a "$HOME" of \\ `music`: the [MASK].')
    run(page)
    expect(page.locator(".bars li")).to_have_count(5)
    assert all(float(text.split()[0]) >= 0 for text in texts(page, "#timings dd"))
    shown = page.locator("#json").text_content()
    command = page.locator("#curl").text_content()
    assert shown
    assert command
    assert_same(sh(command, tmp_path), json.loads(shown))


def test_refused_input_shows_why_and_the_next_answer_replaces_it(
    page: Page, bundled: Server
) -> None:
    page.goto(bundled.url)
    page.get_by_label("Text").fill("there is nothing to fill in")
    run(page)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("422 · validation")
    expect(problem).to_contain_text("mask")
    page.get_by_role("button", name="Insert [MASK]").click()
    expect(page.get_by_label("Text")).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator(".bars li")).to_have_count(5)
    expect(problem).to_be_hidden()


def test_every_mask_has_its_group_and_parameters_are_sent(page: Page, bundled: Server) -> None:
    page.goto(bundled.url)
    page.get_by_label("Text").fill("a [MASK] is a [MASK]")
    page.get_by_text("Parameters", exact=True).click()
    page.get_by_label("Parameters").fill('{"top_k": 2}')
    run(page)
    assert texts(page, ".group h3") == ["Mask 1", "Mask 2"]
    expect(page.locator(".bars li")).to_have_count(4)


def test_keyboard_alone_is_enough(page: Page, bundled: Server) -> None:
    def tab_to(selector: str) -> None:
        while not page.locator(selector).evaluate("node => node === document.activeElement"):
            page.keyboard.press("Tab")

    page.goto(bundled.url)
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    tab_to("#field-text")
    page.keyboard.press("Control+A")
    page.keyboard.type("the [MASK] of a bird")
    tab_to("#run")
    page.keyboard.press("Enter")
    expect(page.locator(".bars li")).to_have_count(5)
    tab_to("#raw summary")
    page.keyboard.press("Space")
    expect(page.locator("#json")).to_be_visible()


def test_classes_are_bars_in_the_order_of_the_answer(page: Page) -> None:
    answer = [[{"label": "joy", "score": 0.9}, {"label": "fear", "score": 0.0001}]]
    posts = open_fake(page, {"task": "text-classification"}, answer)
    page.get_by_label("Text").fill("grüße 🎻")
    run(page)
    assert sent_json(posts[0]) == {"inputs": "grüße 🎻", "parameters": {"top_k": 5}}
    assert texts(page, ".bars .what") == ["joy", "fear"]
    assert texts(page, ".bars .value") == ["90.0 %", "< 0.1 %"]


def test_entities_are_marked_where_they_stand(page: Page) -> None:
    person = {"entity_group": "PER", "word": "ada", "score": 1, "start": 3, "end": 6}
    town = {"entity_group": "LOC", "word": "bonn", "score": 1, "start": 10, "end": 14}
    posts = open_fake(page, {"task": "token-classification"}, [town, person])
    page.get_by_label("Text").fill("🎻: Ada in Bonn.")  # offsets count the violin as one
    run(page)
    assert sent_json(posts[0])["parameters"] == {"aggregation_strategy": "simple"}
    assert texts(page, "mark") == ["AdaPER", "BonnLOC"]
    hues = [mark.evaluate("mark => mark.style.cssText") for mark in page.locator("mark").all()]
    assert len(set(hues)) == 2
    assert texts(page, ".entities") == ["🎻: AdaPER in BonnLOC."]


HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=2</script>"


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("fill-mask", [{"token_str": HOSTILE, "score": 1, "sequence": HOSTILE}]),
        ("text-classification", [[{"label": HOSTILE, "score": 1}]]),
        ("token-classification", [{"entity": HOSTILE, "word": HOSTILE, "score": 1, "start": 0}]),
        ("table-question-answering", {"answer": HOSTILE, "cells": [HOSTILE]}),
        ("any-to-any", [{"generated_text": HOSTILE}]),
        (HOSTILE, {HOSTILE: HOSTILE}),
    ],
)
def test_hostile_output_is_shown_and_not_executed(page: Page, task: str, answer: Any) -> None:
    open_fake(page, {"task": task, "model_id": HOSTILE, "architecture": HOSTILE}, answer)
    run(page)
    expect(page.locator("#answer")).to_contain_text("<img src=x")
    expect(page.locator("#answer :is(img, script), .title :is(img, script)")).to_have_count(0)
    assert page.title() not in ("1", "2")


def test_key_is_asked_for_when_needed_sent_and_never_shown(page: Page) -> None:
    posts = open_fake(page, {"task": "fill-mask", "api_key_required": True}, [])
    page.get_by_label("API key").fill("secret")
    run(page)
    assert posts[0].headers["authorization"] == "Bearer secret"
    curl = page.locator("#curl")
    expect(curl).to_contain_text('-H "Authorization: Bearer $API_KEY"')
    expect(curl).not_to_contain_text("secret")
    page.reload()
    expect(page.get_by_label("API key")).to_have_value("secret")
    assert page.evaluate("localStorage.length") == 0


def test_key_is_asked_for_after_401(page: Page) -> None:
    refusal = {"error": "send the API key", "error_type": "unauthorized"}
    open_fake(page, {"task": "fill-mask"}, refusal, status=401)
    expect(page.get_by_label("API key")).to_be_hidden()
    run(page)
    expect(page.get_by_role("alert")).to_contain_text("401 · unauthorized")
    expect(page.get_by_label("API key")).to_be_visible()


def test_overload_says_when_to_try_again(page: Page) -> None:
    refusal = {"error": "the queue is full", "error_type": "overloaded"}
    headers = {"retry-after": "7", "x-request-id": "abc-1"}
    open_fake(page, {"task": "fill-mask"}, refusal, status=503, headers=headers)
    run(page)
    expect(page.get_by_role("alert")).to_contain_text("Try again in 7 s")
    expect(page.get_by_role("alert")).to_contain_text("Request abc-1")


@pytest.mark.parametrize("task", [None, "fill-mask"])  # the server may learn it from the model
def test_page_waits_for_the_model_and_says_so(page: Page, task: str | None) -> None:
    page.clock.install()
    info: dict[str, Any] = {"state": "loading", "task": task}
    posts = open_fake(page, info, [])
    expect(page.locator("#state")).to_contain_text("Loading the model")
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("Control+Enter")
    info |= {"state": "ready", "task": "fill-mask", "mask_token": "<mask>", "queue_depth": 3}
    page.clock.run_for(2000)
    expect(page.locator("#state")).to_contain_text("Queue 3")
    expect(page.get_by_label("Text")).to_have_value("The violin is a musical <mask>.")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert posts == []


def test_lost_server_is_noticed(page: Page) -> None:
    page.clock.install()
    open_fake(page, {"task": "fill-mask"})
    expect(page.locator("#run")).to_have_attribute("aria-disabled", "false")
    page.route("**/*", lambda route: route.abort())
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    page.clock.run_for(5000)
    expect(page.locator("#state")).to_contain_text("Cannot be reached")


def test_text_outlives_a_restart_of_the_server(page: Page) -> None:
    page.clock.install()
    info: dict[str, Any] = {"task": "fill-mask", "mask_token": "[MASK]"}
    open_fake(page, info)
    page.get_by_label("Text").fill("mine")
    for change in ({"state": "loading", "mask_token": None}, {"state": "ready"}):
        info |= {"mask_token": "[MASK]"} | change
        page.clock.run_for(5000)
        expect(page.locator("#state")).to_have_attribute("data-state", change["state"] or "")
    expect(page.get_by_label("Text")).to_have_value("mine")


def test_hidden_page_asks_nothing(page: Page) -> None:
    page.clock.install()
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.away})")
    open_fake(page, {"task": "fill-mask"})
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    page.evaluate("window.away = true")
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    page.clock.run_for(60_000)
    assert asked == []
    with page.expect_request(FAKE + "info"):
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")


@pytest.mark.parametrize(
    ("task", "filled", "sent"),
    [
        (
            "zero-shot-classification",
            {"Text": "a", "Candidate labels": "b, c d,"},
            {"inputs": "a", "parameters": {"candidate_labels": ["b", "c d"]}},
        ),
        (
            "feature-extraction",
            {"Text": "a", "Compare with": "b\n\nc\n"},
            {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}},
        ),
        (
            "table-question-answering",
            {"Question": "a?", "Table": 'x,"y ""z"", w"\n1,2\n,"4"'},
            {"inputs": {"query": "a?", "table": {"x": ["1", ""], 'y "z", w': ["2", "4"]}}},
        ),
        ("any-to-any", {"Text": "a"}, {"inputs": "a"}),
        ("text-to-audio", {"Text": "a"}, {"inputs": "a"}),
    ],
)
def test_form_becomes_the_request_of_its_task(
    page: Page, task: str, filled: Mapping[str, str], sent: Any
) -> None:
    posts = open_fake(page, {"task": task}, [])
    for label, text in filled.items():
        page.get_by_label(label).fill(text)
    run(page)
    assert sent_json(posts[0]) == sent
    command = page.locator("#curl").text_content()
    assert command
    assert json.loads(shlex.split(command.replace("\\\n", ""))[-1]) == sent


@pytest.mark.parametrize(
    ("task", "filled", "reason"),
    [
        ("zero-shot-classification", {"Candidate labels": " , "}, "at least one candidate label"),
        ("table-question-answering", {"Table": "a,b\n1,2\n3"}, "Row 2 of the table has 1 cells"),
        ("image-classification", {}, "Choose a file first"),
    ],
)
def test_incomplete_form_is_not_sent(
    page: Page, task: str, filled: Mapping[str, str], reason: str
) -> None:
    posts = open_fake(page, {"task": task})
    for label, text in filled.items():
        page.get_by_label(label).fill(text)
    run(page)
    expect(page.get_by_role("alert")).to_contain_text(reason)
    expect(page.locator("#curl")).to_contain_text(f"# {reason}" if task[0] == "i" else reason)
    assert posts == []


def test_similarities_and_the_embedding_itself(page: Page) -> None:
    answer: list[Any] = [0.75, -0.5, 0.25]
    open_fake(page, {"task": "feature-extraction"}, answer)
    run(page)
    assert texts(page, ".bars .value") == ["0.750", "-0.500", "0.250"]
    page.get_by_label("Embedding").check()
    expect(page.get_by_label("Compare with")).to_be_hidden()
    answer[:] = [[3.0, 4.0]]
    page.keyboard.press("Control+Enter")
    expect(page.locator(".pairs")).to_contain_text("1 × 2")
    assert texts(page, ".pairs dd") == ["2", "1 × 2", "5.0000", "3.0000, 4.0000, …"]


def test_image_goes_as_it_is_and_boxes_lie_over_it(page: Page) -> None:
    box = {"xmin": 0, "ymin": 0, "xmax": WIDTH / 2, "ymax": HEIGHT}
    answer = [{"label": "cat", "score": 0.9, "box": box}]
    posts = open_fake(page, {"task": "object-detection"}, answer)
    choose_photo(page)
    run(page)
    assert posts[0].post_data_buffer == PNG
    assert posts[0].headers["content-type"] == "image/png"
    expect(page.locator("#curl")).to_contain_text("--data-binary '@it'\\''s a photo.png'")
    expect(page.locator(".box")).to_have_text("cat")
    image, found = (page.locator(one).bounding_box() for one in (".stage img", ".box"))
    assert image
    assert found
    assert found["width"] == pytest.approx(image["width"] / 2)
    assert found["height"] == pytest.approx(image["height"])


def test_image_with_parameters_goes_as_base64_and_its_curl_line_does_so_too(
    page: Page, tmp_path: Path
) -> None:
    posts = open_fake(page, {"task": "zero-shot-image-classification"}, [])
    choose_photo(page)
    page.get_by_label("Candidate labels").fill("it's, 100 %\\n")
    run(page)
    sent = sent_json(posts[0])
    assert sent["parameters"] == {"candidate_labels": ["it's", "100 %\\n"]}
    assert base64.b64decode(sent["inputs"]) == PNG
    (tmp_path / PHOTO).write_bytes(PNG)
    assert sh(f"curl() {{ cat; }}\n{page.locator('#curl').text_content()}", tmp_path) == sent


MASK = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("task", "answer", "names"),
    [
        (
            "image-segmentation",
            [{"label": label, "score": None, "mask": MASK} for label in ("sky", "sea")],
            ["sky", "sea"],
        ),
        ("mask-generation", {"masks": [MASK, MASK], "scores": [0.9, 0.8]}, ["Mask 1", "Mask 2"]),
    ],
)
def test_masks_lie_over_the_image(page: Page, task: str, answer: Any, names: list[str]) -> None:
    open_fake(page, {"task": task}, answer)
    choose_photo(page)
    run(page)
    expect(page.locator(".stage .layer")).to_have_count(2)
    assert texts(page, ".bars .what") == names


def test_file_dropped_anywhere_is_chosen(page: Page) -> None:
    open_fake(page, {"task": "automatic-speech-recognition"})
    expect(page.locator(".drop")).to_be_visible()
    page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["x"], "speech.wav", {type: "audio/wav"}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true}));
        }"""
    )
    expect(page.locator(".drop")).to_contain_text("speech.wav · 1 kB")
    expect(page.locator("form audio")).to_be_visible()
    expect(page.locator("#curl")).to_contain_text("-H 'Content-Type: audio/wav'")


@pytest.mark.parametrize("answer", [{"any": ["shape"]}, "text", 7, None, [], [[]]])
def test_answer_of_an_unknown_shape_is_shown_as_json(page: Page, answer: Any) -> None:
    open_fake(page, {"task": "text-classification"}, answer)
    run(page)
    shown = page.locator("#json").text_content()
    assert shown is not None
    assert shown == answer if isinstance(answer, str) else json.loads(shown) == answer


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction", "image-classification"])
def test_narrow_screen_needs_no_sideways_scrolling(page: Page, task: str) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    info = {"task": task, "model_id": "a/" + "x" * 99}
    open_fake(page, info, {"error": "x" * 99}, status=500)
    run(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_copy_button_copies_the_curl_line(page: Page) -> None:
    open_fake(page, {"task": "fill-mask"})
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Text").fill("")
    page.get_by_label("Text").press("Control+V")
    pasted = page.get_by_label("Text").input_value()
    assert pasted.startswith("curl http://onequeue.test/ ")
