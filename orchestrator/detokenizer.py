"""Text from tokens as they come: every character leaves once, as soon as its last byte has come.

The pieces and the rest given by ``finish`` concatenate to the tokens' bytes, read as UTF-8; what is none becomes
replacement characters. Which bytes a token stands for, ``TokenBytes`` says.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection

Read = Callable[[int], bytes]
"""Bytes of a token."""


class Detokenizer:
    """Turns the tokens of one text into its characters.

    Args:
        read: bytes of a token behind others.
        hidden: token ids that give no text: special tokens, end tokens.
        read_first: bytes of the first token that gives text, if it begins a text; None if it goes on with one.
    """

    def __init__(self, read: Read, hidden: Collection[int], read_first: Read | None = None) -> None:
        self._read, self._read_next = read, read_first or read
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became final, often that of the token before.

        An id that the tokenizer does not know, as in a padded vocabulary, gives no text.
        """
        if token_id in self._hidden:
            return ""
        data, self._read_next = self._read_next(token_id), self._read
        return self._utf8.decode(data)

    @property
    def is_open(self) -> bool:
        """Whether the text of the last token waits for a later one, at least in part."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """The text still held back, when no more tokens come."""
        return self._utf8.decode(b"", final=True)
