"""How batches are laid out: nothing lost, nothing twice, and as little padding as can be."""

from __future__ import annotations

import itertools
import random

import pytest

from inference import plans
from inference.blocks import Block
from inference.forward import Plan

LENGTHS = [12, 7, 127, 33, 20, 20, 9, 64, 41, 5, 300, 18, 128, 129]
PLANS = [plans.packed(128), plans.packed(64), plans.grouped(30.0), plans.one_by_one]


def indices(blocks: list[Block]) -> list[int]:
    return sorted(index for block in blocks for row in block for index in row)


def padded_tokens(blocks: list[Block], lengths: list[int]) -> int:
    return sum(len(block) * max(sum(lengths[i] for i in row) for row in block) for block in blocks)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("lengths", [LENGTHS, [5], [5, 5], [300], [300, 400], list(range(1, 200))])
def test_every_input_is_laid_out_once(plan: Plan, lengths: list[int]) -> None:
    assert indices(plan(lengths)) == list(range(len(lengths)))


def test_packed_rows_stay_within_their_width_and_long_inputs_are_alone() -> None:
    blocks = plans.packed(128)(LENGTHS)
    assert [block for block in blocks if LENGTHS[block[0][0]] > 128] == [[[10]], [[13]]]
    rows = [row for block in blocks for row in block if LENGTHS[row[0]] <= 128]
    assert max(sum(LENGTHS[index] for index in row) for row in rows) <= 128


def test_first_fit_fills_rows_to_the_last_token_and_no_further() -> None:
    assert plans.first_fit_decreasing([4, 6, 3, 7], range(4), 10) == [[3, 2], [1, 0]]
    assert plans.first_fit_decreasing([4, 6, 4, 7], range(4), 10) == [[3], [1, 0], [2]]


def test_packing_leaves_little_padding() -> None:
    rng = random.Random(1)
    for _ in range(20):
        lengths = [min(127, 5 + int(rng.expovariate(1 / 20))) for _ in range(32)]
        assert padded_tokens(plans.packed(128)(lengths), lengths) <= 1.1 * sum(lengths)


def test_two_short_inputs_share_one_short_row() -> None:
    assert plans.packed(128)([20, 30]) == [[[1, 0]]]


@pytest.mark.parametrize("overhead", [0.0, 3.0, 25.0, 1000.0])
def test_groups_cost_the_least_that_any_cut_costs(overhead: float) -> None:
    lengths = [3, 3, 9, 10, 11, 30, 31, 60]

    def cost(blocks: list[Block]) -> float:
        return overhead * len(blocks) + padded_tokens(blocks, lengths)

    every_cut = (
        [[[i] for i in range(*ends)] for ends in itertools.pairwise((0, *cut, len(lengths)))]
        for size in range(len(lengths))
        for cut in itertools.combinations(range(1, len(lengths)), size)
    )
    assert cost(plans.grouped(overhead)(lengths)) == min(map(cost, every_cut))


def test_blocks_hold_no_more_than_they_may() -> None:
    lengths = [100] * 32
    blocks = plans.packed(128, block_tokens=1024)(lengths)
    assert [len(block) for block in blocks] == [8] * 4
    assert sorted(index for block in blocks for row in block for index in row) == list(range(32))
