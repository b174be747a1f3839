"""Fill-mask: which tokens are looked at, and the answers of a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch
from transformers.pipelines.base import Pipeline

from errors import ModelFailed, Rejected
from inference.blocks import Encoded
from inference.decoding import decoder
from inference.text import Head, PreparedInput, Stages, TextTask

DEFAULT_TOP_K = 5  # of FillMaskPipeline
MAX_ANSWERS = 1000  # per input; each is a text to decode while its batch mates wait
CHUNK_ELEMENTS = 2**24  # of logits at a time
BLOCK = 128

Choice = tuple[int, tuple[int, ...] | None]  # top_k and the targets
Found = tuple[list[float], list[int]]  # scores and token ids, best first


class FillMask(TextTask):
    """Words for the masks of a text."""

    truncation = 'set parameters.tokenizer_kwargs to {"truncation": true} to cut it'
    everywhere = True

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._words = len(self.tokenizer)
        self._decoder = decoder(self.tokenizer)
        vocabulary = self.tokenizer.get_vocab()
        self.tokenizer.get_vocab = lambda: vocabulary  # it is built anew for each `targets`

    @property
    def example(self) -> tuple[Any, Mapping[str, Any]]:
        """A text with a mask."""
        return f"warm {self.tokenizer.mask_token} up", {}

    @property
    def about(self) -> Mapping[str, Any]:
        """What a mask is written as."""
        return {"mask_token": self.tokenizer.mask_token}

    def stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Let the pipeline sort them: top_k and target_ids are for the answer."""
        stages = super().stages(parameters)
        return Stages({}, stages.tokenizer.get("tokenizer_kwargs", {}), stages.answer)

    def encoded(self, features: Mapping[str, Any], parameters: Mapping[str, Any]) -> Encoded:
        """Want the outputs at the masks.

        Raises:
            Rejected: It has no mask, there are not so many words, or it would be more than
                MAX_ANSWERS.
        """
        mask = self.tokenizer.mask_token_id
        masks = [place for place, token in enumerate(features["input_ids"]) if token == mask]
        if not masks:
            raise Rejected(f"No mask_token ({self.tokenizer.mask_token}) found on the input")
        top_k, targets = choice(parameters)
        if targets is None and top_k > self._words:
            raise Rejected(f"parameters.top_k: the vocabulary has {self._words} words")
        answers = len(masks) * (top_k if targets is None else min(top_k, len(targets)))
        if answers > MAX_ANSWERS:
            raise Rejected(
                f"parameters.top_k: {len(masks)} masks ask for {answers} answers, "
                f"and {MAX_ANSWERS} fit"
            )
        return Encoded(features, masks)

    def answers(
        self, batch: Sequence[PreparedInput], hidden: torch.Tensor, head: Head
    ) -> list[Any]:
        """Return the answers, found in one go for all masks that want equally many."""
        rows: dict[Choice, list[int]] = {}
        start = 0
        for each in batch:
            stop = start + len(each.sequences[0].wanted)
            rows.setdefault(choice(each.parameters), []).extend(range(start, stop))
            start = stop
        found: dict[int, Found] = {}
        for (top_k, targets), members in rows.items():
            chunk = max(1, CHUNK_ELEMENTS // self._words)
            for first in range(0, len(members), chunk):
                some = members[first : first + chunk]
                found |= zip(some, best(head(hidden[some]), top_k, targets), strict=True)
        masks = iter(found[row] for row in range(start))
        encodings = [each.sequences[0] for each in batch]
        return [
            self._written(encoded, [next(masks) for _ in encoded.wanted]) for encoded in encodings
        ]

    def _written(self, encoded: Encoded, masks: list[Found]) -> Any:
        """Write what was found for the masks of one text as the pipeline does."""
        if any(isnan(scores[0]) for scores, _ in masks):
            return ModelFailed("the model gave no finite numbers for this input")
        alone = len(masks) == 1
        answers = []
        for place, (scores, tokens) in zip(encoded.wanted, masks, strict=True):
            # Among several masks the others have to stay in the text.
            texts = self._decoder.filled(encoded.features["input_ids"], place, tokens, alone)
            answers.append(
                [
                    {
                        "score": score,
                        "token": token,
                        "token_str": self._decoder.word(token),
                        "sequence": text,
                    }
                    for score, token, text in zip(scores, tokens, texts, strict=True)
                ]
            )
        return answers[0] if alone else answers


def choice(parameters: Mapping[str, Any]) -> Choice:
    """Return what `parameters` (of postprocessing) choose of the vocabulary, as a key."""
    targets = parameters.get("target_ids")
    return (
        parameters.get("top_k", DEFAULT_TOP_K),
        None if targets is None else tuple(map(int, targets)),
    )


def best(logits: torch.Tensor, top_k: int, targets: tuple[int, ...] | None) -> list[Found]:
    """Return the `top_k` best of each row of `logits` [rows, words], of `targets` if given.

    The scores are a softmax over the whole vocabulary, in float32.
    """
    scores = logits.float().softmax(-1)
    if targets is None:
        values, tokens = top(scores, top_k)
    else:
        chosen = torch.tensor(targets, device=logits.device)
        values, places = scores[:, chosen].topk(min(top_k, len(targets)))
        tokens = chosen[places]
    return list(zip(values.tolist(), tokens.tolist(), strict=True))


def top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `scores.topk(k)` does to [rows, words], faster where k is small.

    The k best are in the k blocks that have the best maxima.
    """
    rows, words = scores.shape
    blocks = words // BLOCK
    if blocks < 4 * k:
        return scores.topk(k)
    whole = blocks * BLOCK
    _, best_blocks = scores[:, :whole].view(rows, blocks, BLOCK).amax(-1).topk(k)
    inside = torch.arange(BLOCK, device=scores.device)
    rest = torch.arange(whole, words, device=scores.device).expand(rows, -1)
    tokens = torch.cat([(best_blocks[:, :, None] * BLOCK + inside).flatten(1), rest], 1)
    values, places = scores.gather(1, tokens).topk(k)
    return values, tokens.gather(1, places)
