"""Texts that a compiled JSON schema lets a model write, at random."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rows import ints
from tiny_models import EOS_ID, byte_tokenizer

from pilotfish.runtime.grammar import Grammars
from pilotfish.steps import Grammar, GrammarKind

_TOKENIZER = byte_tokenizer()
_TEXTS = [_TOKENIZER.decode([token]) for token in range(_TOKENIZER.get_vocab_size())]
_RARE = {" ": 0.02, "\n": 0.01, "\r": 0.0, "\t": 0.0}
_CLOSERS = '"}],:'
LATE = 40
"""Tokens after which a walk makes for the end."""
LENGTH = 250
"""Tokens after which it is given up."""


def walks(grammars: Grammars, grammar: Grammar, count: int) -> Iterator[str]:
    """Complete texts of a grammar of ``byte_tokenizer``; fewer than asked for where walks do not come to an end.

    Raises:
        PilotfishError: it is no grammar, and why.
    """
    grammars.compile(grammar).result()
    for seed in range(count):
        if (text := _walk(grammars, grammar, np.random.default_rng(seed))) is not None:
            yield text


def schema_grammar(schema: str) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, schema, (EOS_ID,))


def _walk(grammars: Grammars, grammar: Grammar, dice: np.random.Generator) -> str | None:
    written: list[int] = []
    while len(written) < LENGTH:
        masks = grammars.masks(grammar, ints(*written), [[]])
        assert masks is not None
        follow = masks[0]
        if follow[EOS_ID] and (dice.random() < 0.4 or len(written) > LATE or follow.sum() == 1):
            return _TOKENIZER.decode(written)
        follow[EOS_ID] = False
        tokens = np.flatnonzero(follow)
        if not len(tokens):
            return None
        weights = np.array([_weight(_TEXTS[token], len(written)) for token in tokens]) + 1e-9
        written.append(int(dice.choice(tokens, p=weights / weights.sum())))
    return None


def _weight(text: str, written: int) -> float:
    if text in _RARE:
        return _RARE[text]
    if text and text in _CLOSERS:
        return 1000.0 if written > LATE else 4.0
    return 1.0
