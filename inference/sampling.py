"""The next token of each request: its own temperature, filters, penalties and random numbers.

transformers' continuous batching can apply some of these to each request, but it sorts the whole
vocabulary for all of them, and one random generator serves all. Here a request pays for what it
asks for, and with a seed its tokens depend on nobody else's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

LEAST_TEMPERATURE = 1e-3  # below, the likeliest token always comes
LIKELY = 256  # of a vocabulary: enough for most nuclei, and found without sorting the rest


@dataclass(frozen=True, slots=True)
class Settings:
    """How a request wants its tokens chosen.

    Attributes:
        temperature: 0: the likeliest token, always.
        top_k: Choose among so many; 0: all.
        top_p: Choose among the likeliest that together have this probability.
        repetition_penalty: Divides the score of tokens that have come, in the prompt or after.
        frequency_penalty: Taken from the score of a generated token for each time it came.
        presence_penalty: Taken from the score of a generated token if it came.
        bias: Added to the scores of tokens.
        seed: None: another one each time.
        logprobs: How many of the likeliest tokens to tell with each token; None: not even its own
            probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None


Logprob = tuple[float, Sequence[tuple[int, float]]]  # of the token, and the likeliest tokens


class Sampler:
    """Chooses the tokens of one request.

    Attributes:
        settings: Of the request.
        logprobs: One for each token, if they were asked for.
        failed: The model gave no finite numbers.
    """

    def __init__(self, settings: Settings, prompt_tokens: int) -> None:
        self.settings = settings
        self.logprobs: list[Logprob] = []
        self.failed = False
        self._prompt_tokens = prompt_tokens
        self._random = Random(settings.seed)

    def __deepcopy__(self, _memo: object) -> Sampler:
        """Stay the same one when the engine begins a request again."""
        return self

    @property
    def shifts(self) -> bool:
        """Whether `shift` has anything to do."""
        wanted = self.settings
        return bool(
            wanted.repetition_penalty != 1.0
            or wanted.frequency_penalty
            or wanted.presence_penalty
            or wanted.bias
        )

    def chance(self) -> float:
        """Return the next random number of this request: 0 <= chance < 1."""
        return self._random.random()

    def shift(self, scores: torch.Tensor, tokens: Sequence[int]) -> None:
        """Apply penalties and biases.

        Args:
            scores: Of the vocabulary, float32; changed in place.
            tokens: Of the prompt, and those generated so far.
        """
        wanted = self.settings
        if wanted.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(tokens)), device=scores.device)
            old = scores[seen]
            penalty = wanted.repetition_penalty
            scores[seen] = torch.where(old < 0, old * penalty, old / penalty)
        if wanted.frequency_penalty or wanted.presence_penalty:
            for token, count in Counter(tokens[self._prompt_tokens :]).items():
                scores[token] -= wanted.frequency_penalty * count + wanted.presence_penalty
        for token, bias in wanted.bias.items():
            scores[token] += bias

    def note(self, scores: torch.Tensor, token: int) -> None:
        """Keep the probability of `token` and the likeliest ones, of `scores` before any filter."""
        logprobs = scores.log_softmax(-1)
        values, tokens = logprobs.topk(self.settings.logprobs or 0)
        best = list(zip(tokens.tolist(), values.tolist(), strict=True))
        self.logprobs.append((float(logprobs[token]), best))


class Sampling(ContinuousBatchingLogitsProcessor):  # type: ignore[misc, unused-ignore]
    """The `Sampler`s of a batch, as a logits processor of transformers' continuous batching.

    The engine itself takes the likeliest token: what is drawn here is made infinitely likely.
    """

    supported_kwargs = {"sampler": Sampler}  # noqa: RUF012 - so the base class has it
    ignored_kwargs = ()

    def __init__(self) -> None:
        self._states: list[FutureRequestState] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Do without the engine's tensor of arguments."""
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_with_new_token: list[FutureRequestState]
    ) -> torch.Tensor:
        """Keep whose scores come next; the tensor of arguments stays empty."""
        self._states = requests_with_new_token
        return torch.zeros(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return `scores` [requests, vocabulary] with the token of each request on top."""
        states = [each.state for each in self._states]
        samplers: list[Sampler] = [each.logit_processor_kwargs["sampler"] for each in states]
        for row, (sampler, state) in enumerate(zip(samplers, states, strict=True)):
            if sampler.shifts:
                sampler.shift(scores[row], state.initial_tokens + state.generated_tokens)
        best_scores = scores[: len(samplers)].amax(-1).tolist()  # prompts in pieces have rows too
        for sampler, best in zip(samplers, best_scores, strict=True):
            sampler.failed = sampler.failed or not math.isfinite(best)
        drawn = [
            row
            for row, each in enumerate(samplers)
            if each.settings.temperature >= LEAST_TEMPERATURE and not each.failed
        ]
        chosen = {}
        if drawn:
            tokens = draw(scores[drawn], [samplers[row] for row in drawn])
            chosen = dict(zip(drawn, tokens, strict=True))
        for row, sampler in enumerate(samplers):
            if sampler.settings.logprobs is not None:
                sampler.note(scores[row], chosen.get(row, int(scores[row].argmax())))
        for row, token in chosen.items():
            scores[row, token] = math.inf
        return scores


def draw(scores: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return a random token for each row of `scores` [rows, vocabulary], as its sampler wants.

    As in transformers, the temperature comes first, then top_k, then top_p.
    """
    wanted = [each.settings for each in samplers]
    chances = scores.new_tensor([[each.chance()] for each in samplers])
    scores = scores / scores.new_tensor([[each.temperature] for each in wanted])
    tokens: dict[int, int] = {}
    free = [row for row, each in enumerate(wanted) if not each.top_k and each.top_p >= 1]
    if free:
        tokens |= zip(free, _pick(scores[free].softmax(-1), chances[free]).tolist(), strict=True)
    for count in (LIKELY, scores.shape[-1]):
        rest = [row for row in range(len(wanted)) if row not in tokens]
        if not rest:
            break
        best, places = scores[rest].topk(min(count, scores.shape[-1]))
        shares, enough = _filtered(scores[rest], best, [wanted[row] for row in rest])
        picks = places.gather(-1, _pick(shares, chances[rest])[:, None])[:, 0].tolist()
        for row, token, is_enough in zip(rest, picks, enough.tolist(), strict=True):
            if is_enough:
                tokens[row] = token
    return [tokens[row] for row in range(len(wanted))]


def _filtered(
    scores: torch.Tensor, best: torch.Tensor, wanted: Sequence[Settings]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the best tokens, 0 where a filter takes one out.

    Args:
        scores: [rows, vocabulary].
        best: The best of each row, in order: [rows, count].
        wanted: How each row is filtered.

    Returns:
        Probabilities [rows, count], and for each row whether no other token could be drawn.
    """
    words, count = scores.shape[-1], best.shape[-1]
    kept = [[min(each.top_k or words, words)] for each in wanted]
    top_k = torch.tensor(kept, device=scores.device)
    ranks = torch.arange(count, device=scores.device)
    top_p = scores.new_tensor([[each.top_p] for each in wanted])
    best = best.masked_fill(ranks >= top_k, -math.inf)
    among = torch.where(top_k < words, best.logsumexp(-1, True), scores.logsumexp(-1, True))
    shares = (best - among).exp()
    sums = shares.cumsum(-1)
    enough = (top_k <= count) | ((top_k == words) & (sums[:, -1:] >= top_p))
    return shares * ((sums - shares < top_p) | (ranks == 0)), enough[:, 0]


def _pick(shares: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Return for each row of `shares` the place where its sum passes `chances` [rows, 1] of it."""
    sums = shares.cumsum(-1)
    total = sums[:, -1:]
    below = torch.minimum(chances * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, below, right=True)[:, 0].clamp(max=sums.shape[-1] - 1)
