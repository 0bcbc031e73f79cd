"""Text from tokens as they come: every character leaves once, as soon as no later token can change it.

The pieces and the rest given by ``finish`` concatenate to what ``decode`` gives for all tokens at
once, special tokens skipped. Two ways lead there, chosen by the tokenizer's decoder:

- Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is a string of bytes, so its bytes go through
  an incremental UTF-8 decoder. Exact for broken UTF-8 as well, at constant cost per token.
- Everything else (SentencePiece style, WordPiece): tokens are decoded behind those whose text left
  last, because a decoder may treat the first token differently, as by stripping its space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from functools import cache
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the tokens of one completion into text.

    Args:
        tokenizer: of the model.
        hidden: token ids that give no text: special tokens, end tokens.
        known: bytes of the tokens met so far, kept by the caller for the next completion.
    """

    def __init__(
        self, tokenizer: FastTokenizer, hidden: Collection[int], known: dict[int, bytes] | None = None
    ) -> None:
        self._hidden = hidden
        known = {} if known is None else known
        is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._text: _Decoder = _ByteDecoder(tokenizer, known) if is_byte_level else _WindowDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that became final, often that of the token before.

        An id that the tokenizer does not know, as in a padded vocabulary, gives no text.
        """
        return "" if token_id in self._hidden else self._text.push(token_id)

    @property
    def is_open(self) -> bool:
        """Whether the text of the last token waits for a later one, at least in part."""
        return self._text.is_open

    def finish(self) -> str:
        """The text still held back, when no more tokens come."""
        return self._text.finish()


def bytes_of(tokenizer: FastTokenizer, token_id: int) -> bytes:
    """What one token stands for by itself; empty for an id that the tokenizer does not know."""
    piece = tokenizer.id_to_token(token_id)
    if piece is None:
        return b""
    if _BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return _bytes_of(piece)
    if _SPACE in piece:  # SentencePiece; its decoder would strip the first
        return piece.replace(_SPACE, " ").encode()
    return str(tokenizer.decode([token_id], skip_special_tokens=False)).encode()


class _Decoder(Protocol):
    @property
    def is_open(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """For byte-level BPE."""

    def __init__(self, tokenizer: FastTokenizer, known: dict[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._known = known
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if (data := self._known.get(token_id)) is None:
            piece = self._tokenizer.id_to_token(token_id)
            data = self._known[token_id] = b"" if piece is None else _bytes_of(piece)
        return self._utf8.decode(data)

    @property
    def is_open(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _bytes_of(piece: str) -> bytes:
    """Bytes of a token; one that is not written in the byte alphabet, as an added one, stands for itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[character] for character in piece)
    except KeyError:
        return piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary.

    GPT-2's table: bytes that print stand for themselves, the others for the characters from 256 on,
    in order.
    """
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


class _WindowDecoder:
    """For every other decoder: what the open tokens add to the text of the tokens before them."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # their text has left
        self._context_text = ""
        self._open: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return ""
        self._open.append(token_id)
        # A run of byte pieces is decoded as a whole: one more byte may spoil those before it.
        return "" if _BYTE_PIECE.fullmatch(piece) else self._release(is_last=False)

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def finish(self) -> str:
        return self._release(is_last=True)

    def _release(self, is_last: bool) -> str:
        text = self._decode(self._context + self._open)
        if not is_last and (text.endswith(_REPLACEMENT) or not text.startswith(self._context_text)):
            return ""
        new = text[len(self._context_text) :]
        if new:  # a context without text would not keep the next token from being the first
            self._context, self._open = self._open, []
            self._context_text = self._decode(self._context)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
