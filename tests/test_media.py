"""Media on the wire: what comes in as bytes and as base64, what is refused and how, and clients."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
from huggingface_hub import InferenceClient, constants
from PIL import Image

from api.huggingface import Call, parse, read, respond
from api.tasks import FORMATS
from entries import Response
from errors import Empty, Rejected, RequestError, TooLarge, UnsupportedType
from tests.servers import Server
from tests.threads import serving
from tests.tiny_media import BUILDERS, png, wav

JSON = "application/json"
PNG = png(1)
WAV = wav(1)
MP4 = b"\0\0\0\x20ftypisom"


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def parsed(body: Any, content_type: str, task: str) -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(data, content_type, max_inputs=4, task=FORMATS[task])


@pytest.mark.parametrize(
    ("task", "data", "own"),
    [
        ("image-classification", PNG, "image/png"),
        ("automatic-speech-recognition", WAV, "audio/x-wav"),
        ("video-classification", MP4, "video/mp4"),
    ],
)
def test_bytes_are_the_input(task: str, data: bytes, own: str) -> None:
    kinds = (own, "application/octet-stream", "application/x-www-form-urlencoded", "")
    for content_type in kinds:
        assert parsed(data, content_type, task) == Call([data], {}, is_list=False)
    for content_type in ("text/plain", "multipart/form-data"):
        with pytest.raises(UnsupportedType, match=f"send {own.partition('/')[0]}/\\* or"):
            parsed(data, content_type, task)


def test_base64_and_data_uris_are_the_same_input() -> None:
    text = as_text(PNG)
    wrapped = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for one in (text, wrapped, f"data:image/png;base64,{text}"):
        assert parsed({"inputs": one}, JSON, "image-classification").inputs == [PNG]
    call = parsed(
        {"inputs": [text, text], "parameters": {"top_k": 2}}, JSON, "image-classification"
    )
    assert call == Call([PNG, PNG], {"top_k": 2}, is_list=True)


def test_inputs_of_several_parts() -> None:
    text = as_text(PNG)
    document = {"image": text, "question": "how?", "word_boxes": [["a", [0, 0, 10, 10]]]}
    (value,) = parsed({"inputs": document}, JSON, "document-question-answering").inputs
    assert value == {
        **document,
        "image": PNG,
        "word_boxes": [("a", (0, 0, 10, 10))],
    }
    (pair,) = parsed({"inputs": {"images": [text, text]}}, JSON, "keypoint-matching").inputs
    assert pair == {"images": [PNG, PNG]}
    table = {"query": "how?", "table": {"a": ["1"], "b": ["2"]}}
    assert parsed({"inputs": [table]}, JSON, "table-question-answering").inputs == [table]
    for task in ("table-question-answering", "zero-shot-image-classification"):
        with pytest.raises(UnsupportedType, match="application/json"):
            parsed(PNG, "", task)


def test_candidate_labels_become_a_list() -> None:
    for labels in ("a, b,", ["a", "b"]):
        body = {"inputs": as_text(PNG), "parameters": {"candidate_labels": labels}}
        parameters = parsed(body, JSON, "zero-shot-object-detection").parameters
        assert parameters == {"candidate_labels": ["a", "b"]}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that claims to have many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def pdf() -> bytes:
    file = BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PDF")
    return file.getvalue()


IMAGE, SPEECH = "image-classification", "automatic-speech-recognition"
HOSTILE: list[tuple[str, bytes, type[RequestError], str]] = [
    (IMAGE, b"", Empty, "the input is empty"),
    (IMAGE, b"<html>", Rejected, "no image that can be read: send PNG, JPEG"),
    (IMAGE, PNG[:20], Rejected, "no image that can be read"),
    (IMAGE, WAV, Rejected, "no image that can be read"),
    (IMAGE, pdf(), Rejected, "no image that can be read"),
    (IMAGE, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", Rejected, "no image"),
    (IMAGE, bomb(8_000, 7_000), TooLarge, "8000 × 7000 pixels"),
    (IMAGE, bomb(50_000, 50_000), TooLarge, "50000 × 50000 pixels"),
    (IMAGE, bomb(2**31 - 1, 1), Rejected, "unequal|no image"),
    (IMAGE, bomb(60_000, 1), Rejected, "its sides are too unequal"),
    (SPEECH, b"", Empty, "the input is empty"),
    (SPEECH, b"RIFF", Rejected, "no audio that can be read: send WAV"),
    (SPEECH, PNG, Rejected, "no audio that can be read"),
    (SPEECH, WAV[:20], Rejected, "no audio that can be read"),
    (SPEECH, wav(1, 0), Rejected, "the audio has no samples"),
    (SPEECH, wav(1, 0.001, channels=1000), Rejected, "1000 channels"),
    (SPEECH, wav(1, 1, 1_000_000), Rejected, "1000000 samples per second"),
    (SPEECH, wav(1, 2, 500), Rejected, "500 samples per second"),
    (SPEECH, wav(1, 1801, 1_000, subtype="PCM_U8"), TooLarge, "lasts 1801 s"),
    (SPEECH, wav(1, format="AIFF"), Rejected, "no audio that can be read"),
    ("video-classification", b"#EXTM3U\nfile:///etc/passwd", Rejected, "no video that can be"),
    ("video-classification", b"", Empty, "the input is empty"),
]


@pytest.mark.parametrize(("task", "data", "error", "text"), HOSTILE)
def test_hostile_bytes_get_their_own_error(
    task: str, data: bytes, error: type[RequestError], text: str
) -> None:
    with pytest.raises(error, match=text):
        parsed(data, "", task)
    good = {IMAGE: PNG, SPEECH: WAV}.get(task, MP4)
    with pytest.raises(error, match=rf"^inputs\[1\]: .*({text})") as refusal:
        parsed({"inputs": [as_text(good), as_text(data)]}, JSON, task)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("task", "body", "text"),
    [
        (IMAGE, {"inputs": "https://example.org/cat.png"}, "^inputs: URLs are not fetched; send"),
        (IMAGE, {"inputs": ["file:///etc/passwd"]}, r"inputs\[0\]: URLs are not fetched"),
        (IMAGE, {"inputs": "/etc/passwd"}, "^inputs: this is not base64"),
        (IMAGE, {"inputs": "cat.png"}, "^inputs: this is not base64"),
        (IMAGE, {"inputs": "data:image/png,abc"}, "^inputs: this is not base64"),
        (IMAGE, {"inputs": 5}, "^inputs: send base64 or a data: URI"),
        (IMAGE, {"inputs": "YQ==", "parameters": {"top_k": 0}}, "^parameters.top_k: .* than or"),
        (IMAGE, {"inputs": "YQ==", "parameters": {"timeout": 1}}, "^parameters.timeout: there is"),
        ("object-detection", {"inputs": "YQ==", "parameters": {"threshold": 2}}, "threshold: .*1"),
        (
            SPEECH,
            {"inputs": "YQ==", "parameters": {"generate_kwargs": {"max_new_tokens": 9999}}},
            "^parameters.generate_kwargs.max_new_tokens: .*1024",
        ),
        (
            SPEECH,
            {"inputs": "YQ==", "parameters": {"generate_kwargs": {"custom_generate": "x"}}},
            "^parameters.generate_kwargs.custom_generate: there is no such parameter",
        ),
        (
            "zero-shot-image-classification",
            {"inputs": "YQ=="},
            "^parameters: Field required",
        ),
        (
            "zero-shot-image-classification",
            {"inputs": "YQ==", "parameters": {"candidate_labels": " , "}},
            "^parameters.candidate_labels: send 1 to 100 labels",
        ),
        (
            "zero-shot-image-classification",
            {
                "inputs": "YQ==",
                "parameters": {"candidate_labels": "a", "hypothesis_template": "{0.__class__}"},
            },
            "^parameters.hypothesis_template: ",
        ),
        ("keypoint-matching", {"inputs": {"images": ["YQ=="]}}, "^inputs.images: .* at least 2"),
        ("keypoint-matching", {"inputs": ["YQ=="]}, r"^inputs\[0\]: "),
        (
            "document-question-answering",
            {"inputs": {"image": "http://x/a.png", "question": "a"}},
            "^inputs.image: URLs are not fetched",
        ),
        (
            "document-question-answering",
            {"inputs": {"image": "YQ==", "question": "a", "word_boxes": [["a", [0, 0, 9, 2000]]]}},
            r"^inputs.word_boxes\[0\]\[1\]\[3\]: .*1000",
        ),
        (
            "table-question-answering",
            {"inputs": {"query": "a", "table": {"a": ["1"], "b": ["1", "2"]}}},
            "^inputs.table: columns of different lengths",
        ),
        ("text-to-audio", {"inputs": "a", "parameters": {"top_p": 0}}, "^parameters.top_p: "),
    ],
)
def test_bad_json_names_what_is_wrong(task: str, body: Any, text: str) -> None:
    with pytest.raises(Rejected, match=text):
        parsed(body, JSON, task)


def test_long_text_is_not_spoken() -> None:
    with pytest.raises(TooLarge, match="5001 characters"):
        parsed(b"a" * 5001, "", "text-to-audio")


@pytest.mark.anyio
async def test_large_bodies_are_looked_through_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_the_loop: list[bool] = []

    def watched(*given: Any) -> Call:
        beside_the_loop.append(threading.current_thread() is not threading.main_thread())
        return parse(*given)

    monkeypatch.setattr("api.huggingface.parse", watched)
    task = FORMATS[SPEECH]
    for data in (wav(1, 5), WAV):
        assert await read(data, "", 4, task) == Call([data], {}, is_list=False)
    with pytest.raises(Rejected):
        await read(b"x" * 100_000, "", 4, task)
    assert beside_the_loop == [True, False, True]


@pytest.mark.anyio
async def test_speech_is_answered_as_wav_or_json() -> None:
    responses = [Response(0, {"audio": as_text(WAV), "sampling_rate": 16_000}, 1, 0, 0, 0, 0, 1)]
    call = parsed(b"hello", "", "text-to-audio")
    sound = await respond(call, responses, "*/*")
    assert sound.headers["content-type"] == "audio/wav"
    assert bytes(sound.body) == WAV
    assert json.loads(bytes((await respond(call, responses, JSON)).body))["sampling_rate"] == 16_000
    listed = parsed({"inputs": ["hello"]}, JSON, "text-to-audio")
    assert len(json.loads(bytes((await respond(listed, responses)).body))) == 1


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the client would not even speak to this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    BUILDERS[request.param](tmp_path / "model")
    with serving(model_id=str(tmp_path / "model")) as started:
        yield started


def curl(running: Server, file: Path, *more: str) -> Any:
    command = ["curl", "-s", "--data-binary", f"@{file}", *more, running.url]
    return json.loads(subprocess.check_output(command))


@pytest.mark.parametrize("running", [IMAGE], indirect=True)
def test_image_classification_by_curl_and_the_hub_client(running: Server, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    plain = curl(running, tmp_path / "cat.png")
    assert plain == curl(running, tmp_path / "cat.png", "-H", "content-type: image/png")
    client = InferenceClient(model=running.url)
    for image in (PNG, str(tmp_path / "cat.png")):
        found = client.image_classification(image)
        assert [each.label for each in found] == [each["label"] for each in plain]
    assert len(client.image_classification(PNG, top_k=2)) == 2
    for status, data in ((422, PNG[:-60]), (422, b"x"), (413, bomb(9_000, 9_000)), (400, b"")):
        response = running.client.post(running.url, content=data)
        assert response.status_code == status, response.text
        assert set(response.json()) == {"error", "error_type"}
    assert curl(running, tmp_path / "cat.png") == plain


@pytest.mark.parametrize("running", ["object-detection"], indirect=True)
def test_object_detection_by_the_hub_client(running: Server) -> None:
    client = InferenceClient(model=running.url)
    found = client.object_detection(PNG, threshold=0.0)
    assert len(found) == 5
    assert found[0].box.xmax >= found[0].box.xmin
    assert client.object_detection(PNG, threshold=1.0) == []


@pytest.mark.parametrize("running", [SPEECH], indirect=True)
def test_speech_recognition_by_curl_and_the_hub_client(running: Server, tmp_path: Path) -> None:
    client = InferenceClient(model=running.url)
    text = client.automatic_speech_recognition(WAV).text
    for form in ("wav", "flac", "ogg", "mp3"):
        file = tmp_path / f"sound.{form}"
        file.write_bytes(wav(1, format=form.upper()))
        assert set(curl(running, file)) == {"text"}
        client.automatic_speech_recognition(str(file))
    (tmp_path / "sound.wav").write_bytes(WAV)
    assert curl(running, tmp_path / "sound.wav") == {"text": text}
    timed = client.automatic_speech_recognition(WAV, extra_body={"return_timestamps": "char"})
    assert timed.chunks
    assert timed.chunks[0].timestamp[1] > 0


@pytest.mark.parametrize("running", ["image-segmentation"], indirect=True)
def test_image_segmentation_by_the_hub_client(running: Server) -> None:
    masks = InferenceClient(model=running.url).image_segmentation(PNG)
    assert {each.mask.size for each in masks} == {(60, 40)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("running", ["zero-shot-image-classification"], indirect=True)
def test_zero_shot_image_classification_by_the_hub_client(running: Server) -> None:
    client = InferenceClient(model=running.url)
    found = client.zero_shot_image_classification(PNG, ["cat", "dog"])
    assert sum(each.score for each in found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("running", ["audio-classification"], indirect=True)
def test_audio_classification_by_the_hub_client(running: Server) -> None:
    client = InferenceClient(model=running.url)
    assert len(client.audio_classification(WAV)) == 7
    assert len(client.audio_classification(WAV, top_k=2, function_to_apply="sigmoid")) == 2


@pytest.mark.parametrize("running", ["text-to-audio"], indirect=True)
def test_speech_by_the_hub_client(running: Server) -> None:
    sound = InferenceClient(model=running.url).text_to_speech("hello you")
    assert soundfile.info(BytesIO(sound)).frames > 0
    answer = httpx.post(running.url, content=b"hello", headers={"accept": JSON}).json()
    assert soundfile.info(BytesIO(base64.b64decode(answer["audio"]))).format == "WAV"


@pytest.mark.parametrize("running", ["table-question-answering"], indirect=True)
def test_table_question_answering_by_the_hub_client(running: Server) -> None:
    client = InferenceClient(model=running.url)
    answer = client.table_question_answering({"a": ["1", "2"]}, "how many?", sequential=True)
    assert isinstance(answer.answer, str)


@pytest.mark.parametrize("running", ["document-question-answering"], indirect=True)
def test_document_question_answering_by_the_hub_client(running: Server) -> None:
    boxes: Any = [["total", [0, 0, 90, 90]], ["7", [100, 0, 190, 90]]]
    client = InferenceClient(model=running.url)
    answers = client.document_question_answering(PNG, "total?", word_boxes=boxes, top_k=2)
    assert answers
    assert {each.answer for each in answers} <= {"total", "7", "total 7"}
