"""Which bytes a token id stands for, whatever the family of its tokenizer; imports no torch.

The one place that says so. A completion's text is the bytes of its tokens one after the other, read as UTF-8; the
``bytes`` of log probabilities are these, and a grammar is followed over these, so that none of them can differ.

What a piece of the vocabulary means is the tokenizer's decoder to say: ``##s`` of WordPiece goes on the word before it,
``▁the`` of SentencePiece begins with a space, ``<0xE2>`` is a byte where the decoder knows bytes. So the decoder itself
is asked, with the piece in the middle of a text: there a space in front is not stripped. Byte-level BPE (GPT-2,
Llama 3, Qwen, SmolLM) alone is read by its alphabet here, as its decoder gives characters, and a piece may have parts
of one.
"""

from __future__ import annotations

import re
from functools import cache

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BEFORE, _BEHIND = "a", "b"  # pieces that every decoder leaves as they are


class TokenBytes:
    """The bytes of each token of a tokenizer.

    Args:
        tokenizer: of the model.

    Attributes:
        size: one more than the largest id of the tokenizer; a model may pad beyond it.
        special: names of its special tokens by id, which a completion's text leaves out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = " ".join if tokenizer.decoder is None else tokenizer.decoder.decode
        self._begin = len(self._decode([_BEFORE]))
        self._joint = len(self._decode([_BEFORE, _BEHIND])) - self._begin  # of what comes behind, its space included
        self._is_byte_level = self._inside("Ġ") == " "
        self._knows_bytes = self._inside("<0x41>") == "A"
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Bytes of a token behind others, maybe parts of characters; none of an id that the tokenizer does not know.

        Those of special tokens are their names.
        """
        if (found := self._known.get(token_id)) is None:
            piece = self._tokenizer.id_to_token(token_id)
            found = self._known[token_id] = b"" if piece is None else self._read(token_id, piece)
        return found

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text: of some families without the space that it has behind others."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or self._is_byte_level or self._byte(piece) is not None:
            return self.of(token_id)
        text = self._decode([piece, _BEHIND])
        return text[: len(text) - self._joint].encode()

    def _read(self, token_id: int, piece: str) -> bytes:
        if self._is_byte_level:
            # An added token is a text, be it in letters of the alphabet: "café" is not b"caf\xe9".
            added = self._added.get(token_id)
            return _from_alphabet(piece) if added is None else added.encode()
        byte = self._byte(piece)
        return self._inside(piece).encode() if byte is None else byte

    def _byte(self, piece: str) -> bytes | None:
        """Of a piece that stands for a byte."""
        match = _BYTE_PIECE.fullmatch(piece) if self._knows_bytes else None
        return None if match is None else bytes.fromhex(match[1])

    def _inside(self, piece: str) -> str:
        """What the decoder makes of a piece between two others."""
        text = self._decode([_BEFORE, piece, _BEHIND])
        return text[self._begin : len(text) - self._joint]


def _from_alphabet(piece: str) -> bytes:
    """Bytes of a piece in the byte alphabet; one that is not stands for itself, as with Hugging Face."""
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
