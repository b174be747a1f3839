"""Texts of answers are what the tokenizer itself would decode."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inference.decoding import Decoder, WordPieceDecoder, decoder
from tests.tiny import word_tokenizer

BUNDLED = str(Path(__file__).parent.parent / "models" / "tiny-fill-mask")


def test_word_pieces_decode_as_whole_texts_do() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    fast, whole = decoder(tokenizer), Decoder(tokenizer)
    assert isinstance(fast, WordPieceDecoder)
    rng = random.Random(1)
    for trial in range(300):
        tokens = rng.choices([*range(8), *range(100, 8000, 7)], k=rng.randrange(1, 12))
        fillings = rng.choices([*range(5), *range(5, 8000)], k=5)
        arguments = (tokens, rng.randrange(len(tokens)), fillings, trial % 2 == 0)
        assert fast.filled(*arguments) == whole.filled(*arguments)


def test_other_tokenizers_decode_whole_texts() -> None:
    tokenizer = word_tokenizer()
    assert type(decoder(tokenizer)) is Decoder
    texts = decoder(tokenizer).filled([0, 5, 4, 1, 2], 2, [6, 7], skip_special=True)
    assert texts == ["one two", "one three"]


def test_word_pieces_that_do_not_decode_one_by_one_are_noticed() -> None:
    words = {"[UNK]": 0, "##b": 1, "a": 2, "c": 3, "[PAD]": 4, "##.": 5}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]"
    )

    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, token_ids: list[int], **arguments: object) -> str:
            text: str = super()._decode(token_ids, **arguments)
            return text.upper() if len(token_ids) > 3 else text

    tokenizer.__class__ = Shouting
    assert type(decoder(tokenizer)) is Decoder
