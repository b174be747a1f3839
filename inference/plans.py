"""How to lay a batch out in blocks: packed rows, groups of like length, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from inference.blocks import Block
from inference.forward import Plan

BLOCK_TOKENS = 2048  # the weights are read once for each block, so much fewer cost time
CLOSE = 1.03  # padded tokens to real ones beyond which another row is tried


def packed(row_tokens: int, block_tokens: int = BLOCK_TOKENS) -> Plan:
    """Put several inputs in one row: no padding but at the ends of rows.

    Rows hold at most `row_tokens`, since attention costs the square of their width, and are as even
    as the inputs allow; an input that is longer has a block of its own. Blocks hold at most
    `block_tokens`, since a call needs memory for each. After Krell et al. 2021, arXiv 2107.02027.
    """

    def plan(lengths: Sequence[int]) -> list[Block]:
        short = [index for index, length in enumerate(lengths) if length <= row_tokens]
        blocks = [[[index]] for index, length in enumerate(lengths) if length > row_tokens]
        rows = _even_rows(lengths, short, row_tokens)
        calls = -(-len(rows) * row_tokens // block_tokens)
        return blocks + [rows[call::calls] for call in range(calls)]

    return plan


def _even_rows(lengths: Sequence[int], indices: Sequence[int], row_tokens: int) -> Block:
    """Return the rows of the narrowest width found, times their number."""
    if not indices:
        return []
    total, longest = (of(lengths[index] for index in indices) for of in (sum, max))
    fewest = -(-total // row_tokens)
    best: Block = []
    least = float("inf")
    for count in (fewest, fewest + 1):
        even = max(longest, -(-total // count))
        for capacity in {even, min(even + even // 32 + 1, row_tokens), row_tokens}:
            rows = first_fit_decreasing(lengths, indices, capacity)
            cost = len(rows) * max(sum(lengths[index] for index in row) for row in rows)
            if cost < least:
                best, least = rows, cost
        if least <= total * CLOSE:
            break
    return best


def first_fit_decreasing(
    lengths: Sequence[int], indices: Sequence[int], capacity: int
) -> list[list[int]]:
    """Put `indices` in rows of at most `capacity` tokens, the longest first, where they fit."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(indices, key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        for row, space in enumerate(free):
            if length <= space:
                rows[row].append(index)
                free[row] -= length
                break
        else:
            rows.append([index])
            free.append(capacity - length)
    return rows


def grouped(overhead_tokens: float) -> Plan:
    """Pad inputs to the longest of a group of like length.

    The batch is sorted and cut where a call's overhead, in tokens, and the padded tokens are least
    together: a dynamic programme over the distinct lengths, after TurboTransformers,
    arXiv 2010.05680.
    """

    def plan(lengths: Sequence[int]) -> list[Block]:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        equal = [list(members) for _, members in groupby(order, key=lengths.__getitem__)]
        best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first n lengths, last cut
        for end in range(1, len(equal) + 1):
            longest, count = lengths[equal[end - 1][0]], 0
            options = []
            for start in range(end - 1, -1, -1):
                count += len(equal[start])
                options.append((best[start][0] + overhead_tokens + count * longest, start))
            best.append(min(options))
        return [
            [[index] for members in equal[start:end] for index in members]
            for start, end in _cuts(best)
        ]

    return plan


def _cuts(best: list[tuple[float, int]]) -> Iterator[tuple[int, int]]:
    end = len(best) - 1
    while end:
        start = best[end][1]
        yield start, end
        end = start


def one_by_one(lengths: Sequence[int]) -> list[Block]:
    """Give each input a block of its own: the untouched model."""
    return [[[index]] for index in range(len(lengths))]
