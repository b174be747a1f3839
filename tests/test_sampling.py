"""Tokens are drawn as transformers would, and a request's depend on its own numbers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from inference.sampling import Sampler, Sampling, Settings, draw

WORDS = 700
DRAWS = 3000


def scores(rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(2)) * scale


def expected(row: torch.Tensor, wanted: Settings) -> torch.Tensor:
    """Return the probabilities that transformers would draw from."""
    logits = TemperatureLogitsWarper(wanted.temperature)(None, row[None])
    if wanted.top_k:
        logits = TopKLogitsWarper(min(wanted.top_k, WORDS))(None, logits)
    if wanted.top_p < 1:
        logits = TopPLogitsWarper(wanted.top_p)(None, logits)
    shares: torch.Tensor = logits.softmax(-1)[0]
    return shares


def state(sampler: Sampler, tokens: list[int]) -> Any:
    return SimpleNamespace(
        state=SimpleNamespace(
            initial_tokens=tokens, generated_tokens=[], logit_processor_kwargs={"sampler": sampler}
        )
    )


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize(
    "wanted",
    [
        Settings(temperature=1.0),
        Settings(temperature=0.5, top_k=5),
        Settings(temperature=2.0, top_k=400),
        Settings(temperature=1.0, top_p=0.3),
        Settings(temperature=1.0, top_p=0.95),
        Settings(temperature=0.8, top_k=50, top_p=0.7),
        Settings(temperature=1.5, top_k=600, top_p=0.9),
        Settings(temperature=1.0, top_k=10_000),
        Settings(temperature=1.0, top_k=2**80),
        Settings(temperature=1.0, top_k=1),
        Settings(temperature=1.0, top_p=1e-9),
        Settings(temperature=1e-3, top_k=3),
    ],
    ids=str,
)
def test_draws_come_as_often_as_transformers_says(wanted: Settings, scale: float) -> None:
    row = scores(scale=scale)[0]
    shares = expected(row, wanted)
    sampler = Sampler(replace(wanted, seed=3), 0)
    counts = Counter(draw(row.expand(DRAWS, -1), [sampler] * DRAWS))
    assert all(shares[token] > 0 for token in counts), "a token that a filter took out"
    best = shares.topk(3)
    for share, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        error = 5 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-9
        assert abs(counts[token] / DRAWS - share) <= error


def test_the_last_chance_draws_a_token_that_was_not_filtered() -> None:
    wanted = Settings(temperature=1.0, top_k=3)
    sampler = Sampler(wanted, 0)
    sampler.chance = lambda: 1 - 2**-53  # type: ignore[method-assign]
    (token,) = draw(scores(), [sampler])
    assert token in scores()[0].topk(3).indices


def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    def tokens(mates: int) -> list[int]:
        seeded = Sampler(Settings(temperature=1.0, seed=7), 0)
        others = [Sampler(Settings(temperature=1.5, top_k=9), 0) for _ in range(mates)]
        rows = torch.cat([scores(), scores(mates)])
        return [draw(rows, [seeded, *others])[0] for _ in range(8)]

    assert tokens(0) == tokens(5) == tokens(1)
    assert len(set(tokens(0))) > 1


def test_a_batch_takes_the_likeliest_token_unless_it_is_to_be_drawn() -> None:
    greedy = Sampler(Settings(), 0)
    drawn = Sampler(Settings(temperature=5.0, seed=1), 0)
    processor = Sampling()
    processor.prepare_tensor_args([state(greedy, [1]), state(drawn, [1])])
    before = scores(2)
    after = processor(before.clone(), torch.zeros(0))
    assert torch.equal(after[0], before[0])
    again = Sampler(Settings(temperature=5.0, seed=1), 0)
    assert int(after[1].argmax()) == draw(before[1:], [again])[0]


def test_penalties_and_biases_shift_the_scores() -> None:
    row = scores()[0]
    prompt, new = [3, 4, 4], [5, 5, 6]
    shifted = row.clone()
    Sampler(Settings(repetition_penalty=1.3), 3).shift(shifted, prompt + new)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + new]), row[None].clone())
    assert torch.allclose(shifted, theirs[0])
    shifted = row.clone()
    wanted = Settings(frequency_penalty=0.5, presence_penalty=0.25, bias={9: 2.0})
    Sampler(wanted, 3).shift(shifted, prompt + new)
    change = {token: float(shifted[token] - row[token]) for token in (3, 4, 5, 6, 9)}
    assert change == pytest.approx({3: 0, 4: 0, 5: -1.25, 6: -0.75, 9: 2.0}, abs=1e-5)


def test_probabilities_are_told_of_the_scores_before_any_filter() -> None:
    sampler = Sampler(Settings(temperature=1.0, top_k=1, logprobs=2), 0)
    processor = Sampling()
    processor.prepare_tensor_args([state(sampler, [1])])
    processor(scores(), torch.zeros(0))
    ((logprob, best),) = sampler.logprobs
    logprobs = scores()[0].log_softmax(-1)
    assert logprob == pytest.approx(float(logprobs.max()))
    assert [value for _, value in best] == pytest.approx(logprobs.topk(2).values.tolist())


def test_extreme_settings_draw_the_likeliest_token() -> None:
    for wanted in (
        Settings(temperature=1.0, top_p=5e-324),
        Settings(temperature=1e-3, top_p=1e-40, top_k=500),
        Settings(temperature=1e-3),
    ):
        assert draw(scores(), [Sampler(wanted, 0)]) == [int(scores().argmax())]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    samplers = [Sampler(Settings(temperature=1.0), 0) for _ in range(3)]
    rows = scores(3)
    rows[1, 5] = float("nan")
    processor = Sampling()
    processor.prepare_tensor_args([state(each, [1]) for each in samplers])
    after = processor(torch.cat([rows, rows[1:2]]), torch.zeros(0))  # one that needs no token yet
    assert [each.failed for each in samplers] == [False, True, False]
    assert after[0].isinf().sum() == after[2].isinf().sum() == 1
