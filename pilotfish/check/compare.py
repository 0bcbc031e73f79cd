"""Whether two answers are the same, and where they part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pilotfish.client.results import Completion


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index at which two sequences part, also where one just ends; None if they are equal.

    >>> first_difference([5, 2, 7], [5, 3]), first_difference([5], [5, 2]), first_difference([5], [5])
    (1, 1, None)
    """
    pairs = enumerate(zip_longest(one, other))
    return next((index for index, (a, b) in pairs if a != b), None)


def difference(wanted: Completion, got: Completion) -> str | None:
    """How an answer differs from the one wanted: its first other token, its text, or its end; None if it does not."""
    if (index := first_difference(wanted.token_ids, got.token_ids)) is not None:
        return f"token {index + 1} is {_token(got, index)} instead of {_token(wanted, index)}"
    if wanted.text != got.text:
        return f"same tokens, other text: {_brief(got.text)} instead of {_brief(wanted.text)}"
    if wanted.finish_reason != got.finish_reason:
        return f"same tokens, but finish_reason is {got.finish_reason} instead of {wanted.finish_reason}"
    return None


def _token(completion: Completion, index: int) -> str:
    if index >= len(completion.token_ids):
        return f"missing ({completion.finish_reason})"
    kinds = [token.kind for piece in completion.pieces for token in piece.tokens]
    return f"{completion.token_ids[index]} ({kinds[index]})"


def _brief(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:18]}…{text[-18:]}")
