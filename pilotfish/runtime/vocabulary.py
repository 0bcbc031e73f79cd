"""A tokenizer's vocabulary as grammars see it: the bytes of every token, and which tokens no text may have."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.errors import FailedPreconditionError
from pilotfish.runtime.slots import Bools
from pilotfish.token_bytes import TokenBytes
from pilotfish.tokenizer_hash import load_tokenizer

if TYPE_CHECKING:
    import xgrammar

_CONTROLS = frozenset(range(0x20)) - frozenset(b"\n\r")
_AFTER = {
    0xE0: rb"[\x80-\x9f]",  # shorter in two bytes
    0xED: rb"[\xa0-\xbf]",  # a surrogate
    0xF0: rb"[\x80-\x8f]",  # shorter in three bytes
    0xF4: rb"[\x90-\xbf]",  # past the last character
}
"""Of bytes that begin a character in UTF-8, those that may not come next (RFC 3629, section 4)."""
_NONE = re.compile(rb"[\xc0\xc1\xf5-\xff]|" + b"|".join(re.escape(bytes([a])) + b for a, b in _AFTER.items()))


class Vocabulary:
    """A vocabulary, read on first use: it takes a fifth of a second, and few deployments are ever asked for a grammar.

    Args:
        folder: with tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def size(self) -> int:
        """Ids of the tokenizer, added tokens included."""
        return self._bytes.size

    @property
    def textless(self) -> Collection[int]:
        """Special tokens, which the text of a completion leaves out."""
        return self._bytes.special

    @cached_property
    def unicode(self) -> Bools:
        """Tokens without bytes that are no character, bool[tokens].

        xgrammar 0.2 takes some for one: those of a surrogate, those that say in more bytes what fewer can, those past
        the last character. Whoever decodes the text reads replacement characters.
        """
        return np.array([_NONE.search(text) is None for text in self.layout.decoded_vocab])

    @cached_property
    def goes_on_badly(self) -> dict[int, Bools]:
        """Of tokens whose last byte begins a character, the tokens that may not follow, bool[tokens]."""
        texts = self.layout.decoded_vocab
        bad = {byte: np.array([re.match(after, text) is not None for text in texts]) for byte, after in _AFTER.items()}
        return {index: bad[text[-1]] for index, text in enumerate(texts) if text and text[-1] in bad}

    @cached_property
    def json(self) -> Bools:
        """Tokens that may stand in JSON text, bool[tokens].

        It has control characters between its parts alone, and there spaces and ends of lines will do. xgrammar 0.2
        lets them into strings whose length a schema limits, where they are errors (RFC 8259, section 7).
        """
        return self.unicode & [_CONTROLS.isdisjoint(text) for text in self.layout.decoded_vocab]

    @cached_property
    def layout(self) -> xgrammar.TokenizerInfo:
        """What xgrammar makes of the vocabulary.

        Raises:
            FailedPreconditionError: xgrammar is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise FailedPreconditionError(f"this worker has no xgrammar ({error}); pip install xgrammar") from error
        return xgrammar.TokenizerInfo(
            # What is no text never matches: special tokens, and ids that the tokenizer leaves out.
            [b"" if token in self.textless else self._bytes.of(token) for token in range(self.size)],
            xgrammar.VocabType.RAW,
            vocab_size=self.size,
            stop_token_ids=[],  # each grammar names its own
        )

    @cached_property
    def compiler(self) -> xgrammar.GrammarCompiler:
        """Compiles in the thread that asks."""
        import xgrammar

        return xgrammar.GrammarCompiler(self.layout, max_threads=1, cache_enabled=False)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(load_tokenizer(self.folder))
