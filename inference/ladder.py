"""Which way of running batches a model gets: the fastest that is proved right on it, at load.

Packing is silently wrong for a model whose tokens see their neighbours in other ways than through
the attention mask, so nothing is believed: every way answers probes, and what the untouched model
answers to each of them alone decides.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference import plans, tuning
from inference.blocks import Encoded, position_offset
from inference.forward import PROVED_TOKENS, Forward
from inference.heads import FAULTS, reason_of

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5  # of the largest output, in float32; rounding stays an order of magnitude below
CLOSE = {"bfloat16": 0.1, "float16": 0.02, "int8": 0.3}  # of the spread of the outputs, in the mean
PROBE_TOKENS = (64, 3, 19, 5, 128, 33, 4, 90, 12, 7, 50, 26)
ROW_TOKENS = 128  # half as many and twice as many cost 0 to 7 % more, by model and batch
SEED = 5


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of running batches.

    Attributes:
        name: For people.
        forward: Runs them.
        packs: It puts several inputs in one row.
        pads: A batch costs as if each of its inputs were as long as the longest.
        proof: Runs them in the way in which it would be most wrong; None: `forward` does.
        facts: For /info: how it was chosen, and why nothing faster was.
    """

    name: str
    forward: Forward
    packs: bool = False
    pads: bool = False
    proof: Forward | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def climb(model: PreTrainedModel, probes: Sequence[Encoded], reference: torch.Tensor) -> Rung:
    """Return the fastest way that answers `probes` as `reference` does.

    Args:
        model: As it will serve.
        probes: Inputs of mixed length.
        reference: What the untouched model answers to each alone: [wanted tokens, outputs].

    Raises:
        RuntimeError: The model cannot run them at all.
    """
    refused: dict[str, str] = {}
    for rung in _rungs(model, probes):
        try:
            difference = _difference(answers(rung.proof or rung.forward, probes), reference)
        except FAULTS as fault:
            reason = reason_of(fault)
        else:
            if difference <= TOLERANCE:
                return _kept(rung, difference, refused)
            reason = f"differs by {difference:.1e}, more than {TOLERANCE:.0e}"
        refused[rung.name] = reason
    raise RuntimeError(f"no way to run it: {refused}")


def as_graph(rung: Rung, probes: Sequence[Encoded]) -> Rung:
    """Return `rung` with its encoder as a graph, if it has one that answers alike and is faster.

    Args:
        rung: Of a model that will not change any more.
        probes: As for `climb`.
    """
    if not rung.packs:
        return rung
    try:
        graph = rung.forward.as_graph(probes)
        for part in (probes, probes[:1], probes[1:3], probes[3:]):  # of other shapes than recorded
            difference = _difference(answers(graph, part), answers(rung.forward, part))
            if not difference <= TOLERANCE:
                raise ValueError(f"differs by {difference:.1e}")
    except FAULTS as fault:
        logger.info("no graph: %s", reason_of(fault))
        return rung
    batch = tuning.typical_batch(probes[0])
    ways = {way: partial(answers, way, batch) for way in (rung.forward, graph)}
    faster = tuning.fastest(ways)
    return replace(rung, forward=faster, facts={**rung.facts, "graph": faster is graph})


def check_close(rung: Rung, probes: Sequence[Encoded], reference: torch.Tensor, dtype: str) -> Rung:
    """See that a model whose precision was lowered since `climb` still answers alike.

    Args:
        rung: What `climb` returned.
        probes: As for `climb`.
        reference: As for `climb`, of the model in float32.
        dtype: The precision.

    Raises:
        ValueError: It does not.
    """
    error = (answers(rung.forward, probes) - reference).norm()
    share = float(error / (reference - reference.mean()).norm())
    logger.info("%s: the outputs differ by %.1f %% of their spread", dtype, share * 100)
    if not share <= CLOSE[dtype]:
        raise ValueError(f"dtype {dtype}: the outputs differ by {share:.0%} of their spread")
    return replace(rung, facts={**rung.facts, "difference_to_float32": share})


def answers(forward: Forward, batch: Sequence[Encoded]) -> torch.Tensor:
    """Return the outputs at the wanted tokens of `batch`, in float32."""
    with torch.inference_mode():
        return forward.head(forward.encode(batch)).float()


def untouched(model: PreTrainedModel) -> Forward:
    """Return the forward that everything is measured against."""
    return Forward(model, plans.one_by_one, split=False)


def first(_tokens: int) -> list[int]:
    """Return the first position of a probe."""
    return [0]


def first_middle_last(tokens: int) -> list[int]:
    """Return positions of a probe that together see what goes wrong."""
    return sorted({0, tokens // 2, tokens - 1})


def make_probes(
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    wanted: Callable[[int], Sequence[int]] = first_middle_last,
    seed: int = SEED,
) -> list[Encoded]:
    """Return inputs that can expose a difference.

    Several to a row and one alone, the first and the last of a row, from three tokens to nearly the
    maximum and beyond local attention, all different and all the same token.

    Args:
        tokenizer: Names the special tokens and the features.
        max_tokens: Of one input.
        wanted: Returns the positions whose outputs are compared, of the length in tokens.
        seed: Of the tokens.
    """
    rng = random.Random(seed)
    longest = min(max_tokens or PROVED_TOKENS, PROVED_TOKENS)
    usable = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)) or [0]
    extras = set(tokenizer("a")) - {"input_ids", "attention_mask"}
    probes = []
    for length in (longest, *(min(length, longest) for length in PROBE_TOKENS)):
        tokens = rng.choices(usable if length % 2 else usable[:1], k=length)
        tokens[length // 2] = _or(tokenizer.mask_token_id, tokens[length // 2])
        tokens[0] = _or(tokenizer.cls_token_id, tokens[0])
        tokens[-1] = _or(tokenizer.sep_token_id, tokens[-1])
        features = {"input_ids": tokens} | {name: [0] * length for name in extras}
        probes.append(Encoded(features, wanted(length)))
    return probes


def _rungs(model: PreTrainedModel, probes: Sequence[Encoded]) -> Iterator[Rung]:
    """Yield the ways, the fastest first."""
    offset = position_offset(model.config)
    forward = Forward(model, plans.packed(ROW_TOKENS), position_offset=offset)
    yield Rung(f"packed in rows of {ROW_TOKENS}", forward, packs=True)
    splits = [True, False] if model.base_model is not model else [True]
    shortest = min(probes, key=lambda probe: probe.tokens)
    overhead = tuning.overhead_tokens(model, shortest)
    for split in splits:
        forward, one_group = (
            Forward(model, plans.grouped(tokens), split=split) for tokens in (overhead, inf)
        )
        name = "grouped by length" if split else "grouped by length, whole"
        yield Rung(name, forward, pads=True, proof=one_group)
    for split in splits:
        name = "one by one" if split else "one by one, whole"
        yield Rung(name, Forward(model, plans.one_by_one, split=split))


def _kept(rung: Rung, difference: float, refused: dict[str, str]) -> Rung:
    """Tell people which way it is, and why none before it."""
    reasons = "".join(f"; not {name}: {reason}" for name, reason in refused.items())
    logger.info(
        "batches run %s: largest difference %.1e on the probes%s", rung.name, difference, reasons
    )
    facts = {"path": rung.name, "largest_difference": difference, "refused": refused}
    return replace(rung, facts=facts)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in units of the largest output where that is above 1."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def _or(token: int | None, other: int) -> int:
    return other if token is None else token
