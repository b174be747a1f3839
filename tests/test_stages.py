"""How a batch is split into forward passes."""

from __future__ import annotations

import pytest

from stages import groups
from tests.fakes import FakePrepared


def of_lengths(tokens: list[int], names: str = "") -> list[FakePrepared]:
    return [
        FakePrepared("x", n, name)
        for n, name in zip(tokens, names or [""] * len(tokens), strict=True)
    ]


@pytest.mark.parametrize(
    ("tokens", "cap", "pads", "expected"),
    [
        ([1, 1, 1], 3, True, [[0, 1, 2]]),
        ([1, 1, 1, 1], 3, True, [[0, 1, 2], [3]]),
        ([2, 1, 3], 6, True, [[0, 1], [2]]),
        ([2, 1, 3], 6, False, [[0, 1, 2]]),
        ([2, 1, 3, 1], 6, False, [[0, 1, 2], [3]]),
        ([10, 1], 3, True, [[0], [1]]),
        ([10, 1], 3, False, [[0], [1]]),
        ([], 3, True, []),
    ],
)
def test_groups_stay_within_the_token_cap(
    tokens: list[int], cap: int, pads: bool, expected: list[list[int]]
) -> None:
    assert groups(of_lengths(tokens), cap, pads) == expected


def test_groups_never_mix_forward_parameters() -> None:
    assert groups(of_lengths([1, 2, 3], "aba"), 100, pads=True) == [[0, 2], [1]]
