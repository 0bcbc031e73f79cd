"""Where a completion ends inside a run of tokens; nothing after that place leaves.

Two stages. On token ids, at once, so that the next round is planned right: ``cut_run``. On text,
while the workers are busy: ``StopScanner``, which may end a request some tokens earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a completion ended (generation.proto)."""

    STOP = 1
    LENGTH = 2


def cut_run(
    tokens: Sequence[int], generated: int, max_tokens: int, end_token_ids: Collection[int]
) -> tuple[int, FinishReason | None]:
    """How many tokens of a run are kept, and why the completion ends with them, if it does.

    An end token is kept, as the last one. Where it falls on the last place that ``max_tokens``
    allows, the reason is STOP.

    Args:
        tokens: new tokens of one round.
        generated: completion tokens before them, below ``max_tokens``.
        max_tokens: most completion tokens.
        end_token_ids: the model's own end tokens, unless ignored, and the request's stop tokens.

    >>> cut_run([5, 2, 7], generated=10, max_tokens=64, end_token_ids={2})
    (2, <FinishReason.STOP: 1>)
    """
    room = max_tokens - generated
    if len(tokens) < room and not any(map(end_token_ids.__contains__, tokens)):
        return len(tokens), None
    for count, token in enumerate(tokens[:room], start=1):
        if token in end_token_ids:
            return count, FinishReason.STOP
    return (room, FinishReason.LENGTH) if len(tokens) >= room else (len(tokens), None)


class StopScanner:
    """Finds stop strings in text that comes in pieces, and lets nothing of them out, or nothing behind them.

    The first stop string to be complete ends the text; of several that are complete at the same
    character, the longest. So the outcome does not depend on how the text is cut into pieces.

    Args:
        stops: none of them empty. Without any, text passes through.
        included: the one that ends the text leaves as part of it.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        self._stops, self._included = tuple(stops), included
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete: the piece pushed last completed it."""
        return self._is_stopped

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next piece; returns what may leave now. Nothing leaves after a stop string.

        What could be the beginning of a stop string is held back.

        Args:
            text: the piece.
            may_stop: a stop string that is complete with this piece counts; else it is text like any other.
        """
        if self._is_stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if may_stop and (stop := self._first_stop(text)) is not None:
            self._is_stopped, self._held = True, ""
            end, start = stop
            return text[: end if self._included else start]
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> tuple[int, int] | None:
        """Where the first complete stop string ends, and where it starts."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, default=None)

    def _open_length(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if text.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return 0
