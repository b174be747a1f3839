"""Text as its tokens come: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 6
INCOMPLETE = "\ufffd"  # what bytes decode to that are no character, or none yet


class Detokenizer:
    """Tells what each new token adds to a text.

    A few tokens before the new ones are decoded with them, since what a token looks like may depend
    on whether it begins the text: many tokenizers drop a space there.

    Args:
        decode: Makes text of tokens.
        prompt: What the new tokens follow.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])  # the context, and what is not told yet
        self._told = len(self._tokens)
        self._known = decode(self._tokens)  # the text of those that are told
        if self._known.endswith(INCOMPLETE):  # a prompt of tokens that ends within a character
            self._tokens, self._told, self._known = [], 0, ""

    def push(self, token: int) -> str:
        """Return what `token` adds to the text, as far as it can be told."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE):
            return ""
        return self._advance(text)

    def end(self) -> str:
        """Return what is left to tell: bytes that have become no character."""
        return self._advance(self._decode(self._tokens))

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            del self._tokens[: self._told]
            self._told = len(self._tokens)
            self._known = self._decode(self._tokens)
        return new


class StopStrings:
    """Cuts a text that comes in pieces before the first of some strings.

    Attributes:
        met: One of them has come; the text is over.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.met = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Return what can be told of the text so far: it is no part of a stop string."""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.met = True
            self._held = ""
            return held[: min(places)]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def end(self) -> str:
        """Return what was held back for a stop string that has not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
