"""Every family is served by the fastest way that is right for it, and a wrong way is refused."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from inference import ladder, linear, plans, tuning
from inference.blocks import Arguments, Encoded, position_offset
from inference.forward import Forward
from tests.tiny import FAMILIES, tiny_model, word_tokenizer

LIMIT = 290
# Their tokens see one another, or their places, otherwise than through mask and position ids.
NEVER_PACKED = {
    "convbert",
    "deberta",
    "deberta-v2",
    "esm",
    "fnet",
    "layoutlm",
    "mobilebert",
    "nystromformer",
}

NO_GRAPH = NEVER_PACKED


def probes(seed: int = ladder.SEED) -> list[Encoded]:
    return ladder.make_probes(word_tokenizer(), LIMIT, seed=seed)


def climbed(model: Any, batch: list[Encoded] | None = None) -> ladder.Rung:
    batch = batch or probes()
    reference = ladder.answers(ladder.untouched(model), batch)
    return ladder.as_graph(ladder.climb(model, batch, reference), batch)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_served_right_by_the_way_it_earned(
    family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "fastest", lambda ways: list(ways)[-1])  # the graph
    model = tiny_model(family)
    reference = ladder.answers(ladder.untouched(model), probes())
    rung = ladder.climb(model, probes(), reference)
    graph = ladder.as_graph(rung, probes())
    with capsys.disabled():
        has_graph = ", also as a graph" if graph is not rung else ""
        sys.stdout.write(f"\n  {family}: {rung.name}{has_graph}")
    assert rung.packs is (family not in NEVER_PACKED)
    assert (graph is not rung) is (family not in NO_GRAPH)
    for seed in (1, 2):  # texts that it was not chosen on
        others = probes(seed)
        for batch in (others, others[:1], others[2:5], list(reversed(others))):
            expected = ladder.answers(ladder.untouched(model), batch)
            for way in (rung, graph):
                assert torch.allclose(ladder.answers(way.forward, batch), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "mpnet"])
def test_other_heads_are_packed_too(family: str) -> None:
    first = [Encoded(probe.features, [0]) for probe in probes()]
    sizes = {"num_labels": 3}
    assert climbed(tiny_model(family, AutoModelForSequenceClassification, **sizes), first).packs
    assert climbed(tiny_model(family, AutoModelForTokenClassification, **sizes)).packs


class NoMask(Arguments):
    """Lets the members of a row see one another."""

    def _mask(self, members: torch.Tensor) -> torch.Tensor:
        return super()._additive(members[:, None, :, None] == members[:, None, :, None])


class NoRestart(Arguments):
    """Counts positions through a row."""

    def of(self, block: Any, batch: Any, packed: bool) -> dict[str, Any]:
        arguments = super().of(block, batch, packed)
        if "position_ids" in arguments:
            places = torch.arange(arguments["position_ids"].shape[1])
            arguments["position_ids"] = (places + self._position_offset).expand_as(
                arguments["position_ids"]
            )
        return arguments


class Swapped(Forward):
    """Gives two members of a row each other's answers."""

    def encode(self, batch: Any) -> torch.Tensor:
        return super().encode(batch).roll(3, 0)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *itertools.product((NoMask, Swapped), ("bert", "roberta", "modernbert")),
        *itertools.product((NoRestart,), ("bert", "roberta")),  # rotary positions may go on
    ],
)
def test_wrong_packing_is_refused(
    kind: type[Arguments] | type[Forward], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    offset = position_offset(model.config)
    forward = (kind if issubclass(kind, Forward) else Forward)(
        model, plans.packed(128), position_offset=offset
    )
    if issubclass(kind, Arguments):
        forward._arguments = kind(model, offset)
    wrong = ladder.Rung("wrong", forward)
    right = ladder.Rung("right", ladder.untouched(model))
    monkeypatch.setattr(ladder, "_rungs", lambda *_: iter((wrong, right)))
    reference = ladder.answers(ladder.untouched(model), probes())
    rung = ladder.climb(model, probes(), reference)
    assert rung.name == "right"
    assert rung.facts["refused"]["wrong"].startswith("differs by")


def test_wrong_position_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "position_offset", lambda _: 0)
    rung = climbed(tiny_model("roberta"))
    assert rung.name == "grouped by length"


def test_model_that_gives_no_finite_numbers_is_refused() -> None:
    model = tiny_model("bert")
    model.get_input_embeddings().weight[5] = float("nan")
    with pytest.raises(RuntimeError, match="no way to run it"):
        climbed(model)


def test_graph_of_one_shape_only_is_refused() -> None:
    class OneShape(Forward):
        def as_graph(self, batch: Any) -> Forward:
            recorded = self.encode(batch)

            class Constant(Forward):
                def encode(self, batch: Any) -> torch.Tensor:
                    return recorded[: sum(len(encoded.wanted) for encoded in batch)]

            return Constant(self._model, self._plan)

    model = tiny_model("bert")
    rung = ladder.Rung("packed", OneShape(model, plans.packed(128)), packs=True)
    assert ladder.as_graph(rung, probes()) is rung


def test_packed_weights_pass_the_same_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_gains", lambda _layer: True)
    model = tiny_model("bert", hidden_size=256, intermediate_size=512, num_attention_heads=4)
    reference = ladder.answers(ladder.untouched(model), probes())
    assert linear.lay_out(model)
    assert ladder.climb(model, probes(), reference).packs


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_lower_precision_answers_alike_or_is_refused(dtype: str) -> None:
    model = tiny_model("bert", hidden_size=64, intermediate_size=128)
    reference = ladder.answers(ladder.untouched(model), probes())
    rung = ladder.climb(model, probes(), reference)
    if dtype == "int8":
        linear.quantize(model)
    else:
        linear.cast(model, torch.bfloat16)
    close = ladder.check_close(rung, probes(), reference, dtype)
    assert 0 < close.facts["difference_to_float32"] < ladder.CLOSE[dtype]
    with pytest.raises(ValueError, match=f"dtype {dtype}: the outputs differ by"):
        ladder.check_close(rung, probes(), reference.flip(0), dtype)
