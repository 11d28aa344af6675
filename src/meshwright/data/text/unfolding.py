"""Turn ids into text as they come, without ever giving half a character."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
FAR = 64
"""Ids that are decoded again with each new one, at most twice so many: characters before them stay as they are."""


class Unfolding:
    """A text that grows by ids; all its parts together are what its tokenizer makes of all ids at once.

    A part is held back while it ends in bytes that are no character yet.

    Args:
        before: ids before the text, which decide how it is spelt: a space may go before a word, and not before a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer, self._ids = tokenizer, [int(i) for i in before]
        self._given = self._tokenizer.decode(self._ids)

    def more(self, *new: int) -> str:
        """Return the text that the next ids add, "" where they end within a character."""
        self._ids += map(int, new)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNKNOWN) or not text.startswith(self._given):
            return ""
        part, self._given = text[len(self._given) :], text
        if len(self._ids) >= 2 * FAR:  # the text is whole here, so what comes does not depend on far ids
            self._ids = self._ids[-FAR:]
            self._given = self._tokenizer.decode(self._ids)
        return part

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        text = self._tokenizer.decode(self._ids)
        common = next((i for i, (a, b) in enumerate(zip(text, self._given, strict=False)) if a != b), None)
        return text[len(self._given) if common is None else common :]
