"""Token ids to text, for answers that differ from one another in one token."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

TRIALS = 32
TRIAL_TOKENS = 10
SEED = 5


class Decoder:
    """Decodes texts whole, as their tokenizer does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._words: dict[int, str] = {}

    def word(self, token: int) -> str:
        """Return the text of a token alone."""
        if token not in self._words:
            self._words[token] = self._tokenizer.decode([token])
        return self._words[token]

    def filled(
        self, tokens: Sequence[int], place: int, fillings: Sequence[int], skip_special: bool
    ) -> list[str]:
        """Return the text of `tokens` once with each of `fillings` at `place`, without padding."""
        before, after = list(tokens[:place]), list(tokens[place + 1 :])
        pad = self._tokenizer.pad_token_id
        texts: list[str] = self._tokenizer.batch_decode(
            [[each for each in (*before, token, *after) if each != pad] for token in fillings],
            skip_special_tokens=skip_special,
        )
        return texts


class WordPieceDecoder(Decoder):
    """Decodes what the texts have in common once: a word piece adds the same wherever it comes.

    Cheaper than to decode each text; the first piece of a text is an exception.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._pieces: dict[int, str] = {}
        self._padding = frozenset((tokenizer.pad_token_id,))
        added = tokenizer.added_tokens_decoder.items()
        self._skipped = self._padding | {token for token, word in added if word.special}
        self._usual = next(n for n in range(len(tokenizer)) if n not in self._skipped)

    def filled(
        self, tokens: Sequence[int], place: int, fillings: Sequence[int], skip_special: bool
    ) -> list[str]:
        """Return the text of `tokens` once with each of `fillings` at `place`, without padding."""
        skipped = self._skipped if skip_special else self._padding
        before = [token for token in tokens[:place] if token not in skipped]
        if not before or not skipped.isdisjoint(fillings):
            return super().filled(tokens, place, fillings, skip_special)
        start = self.word(before[0]) + "".join(map(self._piece, before[1:]))
        end = "".join(self._piece(token) for token in tokens[place + 1 :] if token not in skipped)
        return [start + self._piece(token) + end for token in fillings]

    def agrees(self) -> bool:
        """Tell whether it decodes random texts as the tokenizer does."""
        rng = random.Random(SEED)
        whole = Decoder(self._tokenizer)
        for trial in range(TRIALS):
            tokens = rng.choices(range(len(self._tokenizer)), k=TRIAL_TOKENS)
            arguments = (tokens, rng.randrange(TRIAL_TOKENS), tokens[:2], trial % 2 == 0)
            if self.filled(*arguments) != whole.filled(*arguments):
                return False
        return True

    def _piece(self, token: int) -> str:
        """Return what `token` adds to a text that it does not begin."""
        if token not in self._pieces:
            text = self._tokenizer.decode([self._usual, token])
            self._pieces[token] = text[len(self.word(self._usual)) :]
        return self._pieces[token]


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decoder:
    """Return the fastest decoder that does as `tokenizer` does."""
    if tokenizer.is_fast and type(tokenizer.backend_tokenizer.decoder).__name__ == "WordPiece":
        fast = WordPieceDecoder(tokenizer)
        if fast.agrees():
            return fast
    return Decoder(tokenizer)
