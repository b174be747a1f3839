"""Text in pieces equals the text whole, whatever the bytes are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.detokenizing import Detokenizer, StopStrings
from inference.generation import decoding
from tests.tiny_causal import byte_tokenizer

Decode = Callable[[Sequence[int]], str]


def in_steps(decode: Decode, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.end()]


def sentence_piece_like() -> PreTrainedTokenizerFast:
    """Return a tokenizer with spaces in front of words, and single bytes for all else."""
    words = [
        "<s>",
        "</s>",
        "<unk>",
        "▁one",
        "▁two",
        "wo",
        "▁",
        "rd",
        *map("<0x{:02X}>".format, range(256)),
    ]
    model = models.BPE(
        {w: n for n, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("words", [260, 3000])
def test_random_bytes_in_steps_are_the_text_at_once(words: int) -> None:
    tokenizer = byte_tokenizer(words)
    decode = decoding(tokenizer)
    rng = random.Random(words)
    for _ in range(200):
        prompt = [*rng.choices(range(words), k=5), *tokenizer("a")["input_ids"]]
        tokens = rng.choices(range(words), k=rng.randint(1, 60))
        assert "".join(in_steps(decode, prompt, tokens)) == decode(tokens)


def test_byte_fallback_in_steps_is_the_text_at_once() -> None:
    tokenizer = sentence_piece_like()
    decode = decoding(tokenizer)
    rng = random.Random(3)
    (first,) = tokenizer.convert_tokens_to_ids(["▁one"])
    for _ in range(200):
        text = "".join(rng.choices([" one", " two", "é", "日本", "👍", "\n", "x"], k=20))
        tokens = [
            token
            for piece in text.replace(" ", "▁")
            for token in tokenizer.backend_tokenizer.model.tokenize(piece)
        ]
        ids = [token.id for token in tokens]
        assert "".join(in_steps(decode, [first], ids)) == text


def test_a_space_before_the_first_new_word_is_kept() -> None:
    tokenizer = sentence_piece_like()
    one, two = tokenizer.convert_tokens_to_ids(["▁one", "▁two"])
    assert in_steps(decoding(tokenizer), [one], [two, one]) == [" two", " one", ""]


@pytest.mark.parametrize("text", ["é", "日本語", "👩‍👩‍👧", "🇫🇷", "a👍🏽b", "ẞ"])
def test_half_a_character_is_never_shown(text: str) -> None:
    tokenizer = byte_tokenizer(260)
    pieces = in_steps(
        decoding(tokenizer), tokenizer("x")["input_ids"], tokenizer(text)["input_ids"]
    )
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_of_no_character_come_at_the_end() -> None:
    tokenizer = byte_tokenizer(260)
    half = tokenizer("é")["input_ids"][:1]
    assert in_steps(decoding(tokenizer), [5], half) == ["", "\ufffd"]


def test_special_tokens_add_nothing() -> None:
    tokenizer = byte_tokenizer(260)
    (letter,) = tokenizer("a")["input_ids"]
    assert in_steps(decoding(tokenizer), [letter], [letter, 1, letter]) == ["a", "", "a", ""]


@pytest.mark.parametrize(
    ("stops", "pieces", "told"),
    [
        (["END"], ["a", "E", "N", "D", "b"], ["a", "", "", ""]),
        (["END"], ["xEN", "Dy"], ["x", ""]),
        (["END"], ["EEN", "D"], ["E", ""]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        (["b", "abc"], ["a", "b"], ["", "a"]),
        (["xyz"], ["xy", "w"], ["", "xyw"]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_stop_strings_end_a_text_across_pieces(
    stops: list[str], pieces: list[str], told: list[str]
) -> None:
    matcher = StopStrings(stops)
    seen = []
    for piece in pieces:
        seen.append(matcher.push(piece))
        if matcher.met:
            break
    assert seen == told


def test_what_was_held_for_a_stop_string_comes_at_the_end() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == "the "
    assert matcher.end() == "EN"


def test_stop_strings_in_any_pieces_cut_where_the_whole_text_is_cut() -> None:
    rng = random.Random(9)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=20))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2)]
        matcher = StopStrings(stops)
        told = ""
        for letter in text:
            told += matcher.push(letter)
            if matcher.met:
                break
        told += matcher.end()
        ends = [end for s in stops if (end := text.find(s) + len(s)) >= len(s)]
        if not ends:
            assert told == text
            continue
        first = min(ends)
        expected = min(text[:first].find(s) for s in stops if s in text[:first])
        assert told == text[:expected]
