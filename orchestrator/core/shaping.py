"""What requests have done to their logits, as the workers are told (``ShapingRows`` in types.proto)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.steps import Grammar, Ints, ShapingRows

if TYPE_CHECKING:
    from orchestrator.core.requests import Request


@dataclass(frozen=True, slots=True)
class Shaping:
    """What one request asks for; ranges are checked where it comes in.

    Attributes:
        logit_bias: token ids and what is added to their logits, -inf bans; ids distinct.
        allowed_token_ids: empty allows all.
        min_tokens: tokens of the completion before one that ends it can come.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def banned_token_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, bias in self.logit_bias if bias == -np.inf)


NOTHING = Shaping()


def shaping_rows(places: Sequence[int], requests: Sequence[Request]) -> ShapingRows:
    """The rows of a step that ask for something, at least one.

    Args:
        places: of these rows in the step, ascending.
        requests: of these rows.
    """
    asked = [(request.params.shaping, request) for request in requests]
    biases = [shaping.logit_bias for shaping, _ in asked]
    allowed = [shaping.allowed_token_ids for shaping, _ in asked]
    ends = [request.params.end_token_ids if shaping.min_tokens else () for shaping, request in asked]
    named = [shaping.grammar for shaping, _ in asked]
    grammars = tuple(dict.fromkeys(grammar for grammar in named if grammar is not None))
    places_of = {grammar: index for index, grammar in enumerate(grammars)}
    return ShapingRows(
        rows=_ints(places),
        prompt_lengths=_ints(len(request.prompt) for _, request in asked),
        repetition_penalties=np.array([shaping.repetition_penalty for shaping, _ in asked], np.float32),
        presence_penalties=np.array([shaping.presence_penalty for shaping, _ in asked], np.float32),
        frequency_penalties=np.array([shaping.frequency_penalty for shaping, _ in asked], np.float32),
        bias_counts=_ints(map(len, biases)),
        bias_token_ids=_ints(token_id for row in biases for token_id, _ in row),
        bias_values=np.array([bias for row in biases for _, bias in row], np.float32),
        allowed_counts=_ints(map(len, allowed)),
        allowed_token_ids=_ints(token_id for row in allowed for token_id in row),
        min_tokens=_ints(shaping.min_tokens for shaping, _ in asked),
        end_counts=_ints(map(len, ends)),
        end_token_ids=_ints(token_id for row in ends for token_id in sorted(row)),
        grammars=grammars,
        grammar_indices=_ints(-1 if grammar is None else places_of[grammar] for grammar in named if grammars),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int32)
