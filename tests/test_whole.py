"""Tasks on media: in one batch, the answers of the untouched pipeline one by one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from config import Settings
from errors import LoadError, ModelFailed, Rejected, RequestError
from inference.examples import examples
from inference.loading import load
from inference.stacking import numbers, part, proved
from inference.tasks import task_of
from inference.writing import plain, written
from model import Model
from stages import groups, run
from tests.models import assert_same, loaded
from tests.tiny_media import BUILDERS, png, wav

LABELS = {"candidate_labels": ["a b", "c"]}
IMAGES = [png(1), png(2, 96, 64), png(3), png(4, 33, 70, "JPEG"), png(5, turned=True), png(1)]
SOUNDS = [wav(1), wav(2, 0.8), wav(3), wav(4, format="FLAC"), wav(1)]


class Models:
    """Builds and loads each tiny model once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.loaded: dict[str, Model] = {}

    def folder(self, task: str) -> str:
        folder = self.root / task
        if not folder.exists():
            BUILDERS[task](folder)
        return str(folder)

    def __getitem__(self, task: str) -> Model:
        if task not in self.loaded:
            self.loaded[task] = loaded(model_id=self.folder(task), device="cpu")
        return self.loaded[task]

    def untouched(self, task: str) -> Any:
        make: Any = transformers.pipeline
        name = "automatic-speech-recognition" if task == "whisper" else task
        return make(name, model=self.folder(task), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("media"))


def answers(model: Model, *inputs: tuple[Any, Mapping[str, Any]]) -> list[Any]:
    """Take `inputs` through the model as the worker does; refusals stay in place."""
    found: dict[int, Any] = dict(enumerate(model.prepare(inputs)))
    valid = [index for index, each in found.items() if not isinstance(each, RequestError)]
    prepared = [found[index] for index in valid]
    for members in groups(prepared, 10**9, pads=model.pads):
        outputs = run(model, [prepared[member] for member in members]).results
        for member, output in zip(members, outputs, strict=True):
            found[valid[member]] = getattr(output, "value", output)
    return [found[index] for index in range(len(inputs))]


def opened(data: bytes) -> Any:
    return Image.open(BytesIO(data))


def pixels(text: str) -> Any:
    return np.asarray(opened(base64.b64decode(text))).astype(int)


def samples(data: bytes) -> Any:
    return soundfile.read(BytesIO(data), dtype="float32")[0]


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("image-classification", {}),
        ("image-classification", {"top_k": 2, "function_to_apply": "sigmoid"}),
        ("image-feature-extraction", {}),
        ("image-feature-extraction", {"pool": True}),
        ("object-detection", {"threshold": 0.0}),
        ("image-segmentation", {}),
        ("depth-estimation", {"predicted_depth": True}),
        ("zero-shot-image-classification", LABELS),
        ("zero-shot-image-classification", {**LABELS, "hypothesis_template": "a {}"}),
        ("zero-shot-object-detection", {**LABELS, "threshold": 0.0, "top_k": 5}),
    ],
)
def test_images_are_answered_as_by_the_untouched_pipeline(
    task: str, parameters: dict[str, Any], models: Models
) -> None:
    untouched = models.untouched(task)
    expected = [plain(untouched(opened(data), **parameters)) for data in IMAGES]
    actual = answers(models[task], *((data, parameters) for data in IMAGES))
    assert expected[0] != expected[1]
    json.dumps(actual, allow_nan=False)
    for one, other in zip(actual, expected, strict=True):
        if "depth" in task:  # levels are cut off, not rounded: 1e-7 can make one of difference
            pictures = [pixels(each.pop("depth")) for each in (one, other)]
            assert np.abs(pictures[0] - pictures[1]).max() <= 1
        assert_same(one, other)


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("audio-classification", {}),
        ("audio-classification", {"top_k": 2, "function_to_apply": "none"}),
        ("zero-shot-audio-classification", LABELS),
        ("automatic-speech-recognition", {}),
        ("automatic-speech-recognition", {"return_timestamps": "char"}),
        ("automatic-speech-recognition", {"chunk_length_s": 0.3, "stride_length_s": 0.05}),
        ("whisper", {"generate_kwargs": {"max_new_tokens": 5}}),
    ],
)
def test_sounds_are_answered_as_by_the_untouched_pipeline(
    task: str, parameters: dict[str, Any], models: Models
) -> None:
    untouched = models.untouched(task)
    rate_hz = untouched.feature_extractor.sampling_rate
    sounds = [wav(seed, seconds, rate_hz) for seed, seconds in ((1, 0.5), (2, 0.8), (3, 0.5))]
    expected = [plain(untouched(samples(data), **parameters)) for data in sounds]
    actual = answers(models[task], *((data, parameters) for data in sounds))
    assert_same(actual, expected)
    json.dumps(actual, allow_nan=False)


def test_a_document_is_answered_as_by_the_untouched_pipeline(models: Models) -> None:
    task = "document-question-answering"
    boxes = [(word, (left, 0, left + 90, 80)) for left, word in enumerate(["total", "7", "a"])]
    value = {"image": IMAGES[0], "question": "total amount ?", "word_boxes": boxes}
    untouched = models.untouched(task)
    expected = untouched({**value, "image": opened(IMAGES[0])}, top_k=2)
    for one, parameters in (
        (value, {"top_k": 2}),
        ({**value, "word_boxes": None}, {"top_k": 2, "word_boxes": boxes}),
    ):
        assert_same(answers(models[task], (one, parameters))[0], plain(expected))
    many = [("word", (1, 1, 9, 9))] * 10_000
    for one, parameters, reason in (
        (value, {"max_seq_len": 20, "doc_stride": 15}, "three quarters"),
        ({**value, "question": "a " * 600}, {}, "no room"),
        ({**value, "word_boxes": many}, {"max_seq_len": 20}, "tokens, and"),
    ):
        (refusal,) = answers(models[task], (one, parameters))
        assert isinstance(refusal, Rejected)
        assert reason in str(refusal)
    (refusal,) = answers(models[task], ({**value, "word_boxes": None}, {}))
    assert isinstance(refusal, Rejected)
    assert "word_boxes" in str(refusal)


def test_tables_are_answered_as_by_the_untouched_pipeline(models: Models) -> None:
    task = "table-question-answering"
    tables = [{"a": ["1", "2", "3"], "b": ["c", "d", "e"]}, {"f": ["4"]}]
    values = [{"query": "how many a?", "table": table} for table in tables]
    untouched = models.untouched(task)
    expected = [plain(untouched(dict(value))) for value in values]
    assert_same(answers(models[task], *((value, {}) for value in values)), expected)
    assert values[0]["table"] == tables[0]
    for parameters in ({"sequential": True}, {"truncation": "drop_rows_to_fit"}):
        assert_same(answers(models[task], (values[0], parameters)), expected[:1])


def test_keypoints_of_two_images_are_those_of_the_untouched_pipeline(models: Models) -> None:
    task = "keypoint-matching"
    pairs = [IMAGES[:2], IMAGES[1:3]]
    untouched = models.untouched(task)
    expected = [plain(untouched([opened(data) for data in pair])) for pair in pairs]
    actual = answers(models[task], *(({"images": pair}, {}) for pair in pairs))
    assert_same(actual, expected)


def test_speech_is_wav(models: Models) -> None:
    model, untouched = models["text-to-audio"], models.untouched("text-to-audio")
    torch.manual_seed(1)
    (spoken,) = answers(model, ("hello", {}))
    torch.manual_seed(1)
    expected = untouched("hello")
    actual, rate_hz = soundfile.read(BytesIO(base64.b64decode(spoken["audio"])))
    assert rate_hz == spoken["sampling_rate"] == expected["sampling_rate"]
    assert np.abs(actual - expected["audio"].clip(-1, 1)).max() < 1e-4
    (refusal,) = answers(model, ("hello", {"do_sample": True}))
    assert isinstance(refusal, Rejected)


def video(seed: int, frames: int = 8, size: int = 48) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            picture = np.asarray(opened(png(seed + number, size, size)))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def test_videos_are_answered_as_by_the_untouched_pipeline(models: Models, tmp_path: Path) -> None:
    task = "video-classification"
    untouched = models.untouched(task)
    files = [tmp_path / name for name in ("one.mp4", "two.mp4")]
    for parameters in ({}, {"frame_sampling_rate": 2, "top_k": 3}):
        for seed, file in enumerate(files):
            file.write_bytes(video(seed))
        expected = [plain(untouched(str(file), **parameters)) for file in files]
        actual = answers(models[task], *((file.read_bytes(), parameters) for file in files))
        assert expected[0] != expected[1]
        assert_same(actual, expected)
    short, broken, good = answers(
        models[task], (video(1, frames=2), {}), (video(1)[:300], {}), (video(1), {})
    )
    assert "2 of the 4 frames" in str(short)
    assert "broken" in str(broken)
    assert isinstance(good, list)


def test_equal_shapes_run_in_one_forward_pass(models: Models) -> None:
    for task, data in (("image-classification", IMAGES), ("audio-classification", SOUNDS)):
        model: Any = models[task]
        assert model.info["batching"]["path"] == "stacked"
        prepared = model.prepare([(each, {}) for each in data])
        calls: list[int] = []
        hook = model._pipeline.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for members in groups(prepared, 10**9, pads=False):
            model.run([prepared[member] for member in members])
        hook.remove()
        assert len(calls) == len({each.group for each in prepared}) == (1 if task[0] == "i" else 2)
    whole: Any = models["automatic-speech-recognition"]
    assert whole.info["batching"] == {"path": "one by one", "refused": {}}
    assert len({each.group for each in whole.prepare([(each, {}) for each in SOUNDS])}) == 5


def test_mixed_parameters_in_one_batch_stay_apart(models: Models) -> None:
    inputs = [(IMAGES[0], {}), (IMAGES[0], {"top_k": 1}), (IMAGES[1], {"top_k": 2})]
    model = models["image-classification"]
    together = answers(model, *inputs)
    assert [len(each) for each in together] == [5, 1, 2]
    assert_same(together, [answers(model, each)[0] for each in inputs])


@pytest.mark.parametrize(
    ("task", "value", "parameters", "message"),
    [
        ("image-classification", png(1)[:-60], {}, "the image is cut off or broken"),
        ("image-classification", b"no image", {}, "no image that can be read"),
        ("image-segmentation", png(1), {"subtask": "panoptic"}, "Subtask panoptic"),
        ("object-detection", png(1)[:-60], {}, "the image is cut off or broken"),
        ("audio-classification", wav(1)[:20], {}, "the audio is cut off or broken"),
        ("automatic-speech-recognition", wav(1)[:20], {}, "the audio is cut off or broken"),
        ("automatic-speech-recognition", wav(1), {"return_timestamps": True}, "CTC can either"),
        (
            "automatic-speech-recognition",
            wav(1),
            {"chunk_length_s": 0.3, "stride_length_s": 0.1},
            "at most a quarter",
        ),
        ("zero-shot-image-classification", png(1)[:-60], LABELS, "the image is cut off"),
        ("whisper", wav(1), {"return_timestamps": "char"}, "Whisper cannot return `char`"),
    ],
)
def test_what_cannot_be_used_is_refused_alone(
    task: str, value: bytes, parameters: dict[str, Any], message: str, models: Models
) -> None:
    good = wav(1) if task == "whisper" or "audio" in task or "speech" in task else png(1)
    usual = LABELS if "zero" in task else {}
    refusal, neighbour = answers(models[task], (value, parameters), (good, usual))
    assert isinstance(refusal, Rejected)
    assert message in str(refusal)
    assert not isinstance(neighbour, Exception)


@pytest.mark.parametrize(
    ("task", "refused"),  # those that the processor makes nothing of
    [
        ("image-classification", []),
        ("object-detection", [1]),
        ("depth-estimation", [0, 1, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_odd_images_are_answered(task: str, refused: list[int], models: Models) -> None:
    animated = BytesIO()
    frames = [opened(png(seed)).convert("P") for seed in (1, 2)]
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    odd = [png(1, 1, 1), png(1, 200, 2), png(2, form="GIF"), animated.getvalue()]
    for mode in ("L", "LA", "RGBA", "1", "I;16", "CMYK"):
        file = BytesIO()
        Image.new(mode, (9, 9)).save(file, "TIFF")
        odd.append(file.getvalue())
    found = answers(models[task], *((data, {}) for data in odd))
    assert not [each for each in found if isinstance(each, ModelFailed)]
    assert [n for n, each in enumerate(found) if isinstance(each, Rejected)] == refused
    json.dumps([each for each in found if not isinstance(each, Rejected)], allow_nan=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("task", ["image-classification", "automatic-speech-recognition"])
def test_lower_precision_answers(task: str, dtype: Any, models: Models) -> None:
    settings = Settings(model_id=models.folder(task), dtype=dtype, device="cpu")
    if dtype == "int8":
        with pytest.raises(LoadError, match="no layer of this model can be quantized"):
            load(settings)
        return
    model = loaded(model_id=models.folder(task), dtype=dtype, device="cpu")
    data = png(1) if task.startswith("image") else wav(1)
    assert model.info["dtype"] == dtype
    assert not isinstance(answers(model, (data, {}))[0], Exception)


def test_long_speech_is_read_in_pieces(models: Models) -> None:
    model: Any = models["automatic-speech-recognition"]
    data = wav(1, 61, 2_000)
    (actual,) = answers(model, (data, {}))
    (pieces,) = answers(model, (data, {"chunk_length_s": 30}))
    assert actual == pieces


def test_json_has_a_word_for_every_answer() -> None:
    mask = np.array([[True, False], [False, True]])
    value = {"a": [np.float32(0.5), torch.tensor([1.0, float("nan")])], 1: (np.int64(3), None)}
    assert plain(value) == {"a": [0.5, [1.0, None]], "1": [3, None]}
    assert plain(float("inf")) is None
    decoded = opened(base64.b64decode(plain(mask)))
    assert np.asarray(decoded).tolist() == [[255, 0], [0, 255]]
    assert plain(torch.tensor(2.5, dtype=torch.bfloat16)) == 2.5
    with pytest.raises(TypeError, match="object has no form"):
        plain(object())
    with pytest.raises(ModelFailed, match="no finite numbers"):
        written("text-to-audio", {"audio": np.array([np.nan]), "sampling_rate": 8}, {})


def test_wrong_stacking_is_found_and_not_used(models: Models) -> None:
    untouched = models.untouched("image-classification")
    tries = examples(untouched)
    assert proved(untouched, tries)["path"] == "stacked"

    def mix(_module: Any, _arguments: Any, output: Any) -> Any:
        output.logits = output.logits + output.logits.mean(0) * (len(output.logits) > 1)
        return output

    def fail(_module: Any, arguments: Any, named: Any) -> None:
        if len(named["pixel_values"]) > 1:
            raise RuntimeError("one at a time")

    hook = untouched.model.register_forward_hook(mix)
    assert "differs by" in proved(untouched, tries)["refused"]["stacked"]
    hook.remove()
    hook = untouched.model.register_forward_pre_hook(fail, with_kwargs=True)
    facts = proved(untouched, tries)
    assert facts == {"path": "one by one", "refused": {"stacked": "RuntimeError: one at a time"}}


def test_parts_of_an_output_are_those_of_one_input() -> None:
    output = {"a": torch.tensor([[1.0], [2.0]]), "b": (torch.tensor([3, 4]), None), "c": "same"}
    assert [each.item() for each in numbers(part(output, 1, 2))] == [2, 4]
    assert part(output, 0, 2)["c"] == "same"
    with pytest.raises(ValueError, match="for 3 inputs"):
        part(output, 0, 3)


def test_task_is_told_by_the_architecture() -> None:
    for name, model_type, task in (
        ("CLIPModel", "clip", "zero-shot-image-classification"),
        ("ClapModel", "clap", "zero-shot-audio-classification"),
        ("SamModel", "sam", "mask-generation"),
        ("WhisperForConditionalGeneration", "whisper", "automatic-speech-recognition"),
        ("ViTModel", "vit", "image-feature-extraction"),
        ("BertModel", "bert", "feature-extraction"),
    ):
        config = transformers.AutoConfig.for_model(model_type, architectures=[name])
        assert task_of(config) == task
    config = transformers.AutoConfig.for_model("wav2vec2", architectures=["Wav2Vec2Model"])
    with pytest.raises(ValueError, match="no task is known for Wav2Vec2Model; set TASK"):
        task_of(config)
