"""Where an answer must end, worked out the slow way from the whole answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pilotfish.check.compare import first_difference

if TYPE_CHECKING:
    from pilotfish.client.results import Completion, FinishReason

_NEVER = "\x00never written\x00"


@dataclass(frozen=True)
class Ending:
    """What an answer must be."""

    token_ids: tuple[int, ...]
    text: str | None
    """None: whatever the tokens give."""
    reason: FinishReason


def misses(ending: Ending, answer: Completion) -> list[str]:
    """How an answer is not what it must be."""
    faults = []
    if (index := first_difference(ending.token_ids, answer.token_ids)) is not None:
        lengths = f"{len(answer.token_ids)} tokens instead of {len(ending.token_ids)}"
        faults.append(f"{lengths}, other from token {index + 1} on")
    if ending.text is not None and _whole(ending.text) != _whole(answer.text):
        faults.append(f"the text ends with {answer.text[-16:]!r} instead of {ending.text[-16:]!r}")
    if answer.finish_reason != ending.reason:
        faults.append(f"finish_reason is {answer.finish_reason} instead of {ending.reason}")
    return faults


def cut_at_stop_text(answer: Completion, stops: Sequence[str]) -> Ending | None:
    """The text before the first stop text to be complete, and the tokens that have any of it.

    None where that cannot be told: the next token has no text of its own, as one in the middle of a character.
    """
    texts = [token.text for piece in answer.pieces for token in piece.tokens]
    for count in range(1, len(texts) + 1):
        text = "".join(texts[:count])
        complete = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        if complete:
            text = text[: min(complete)[1]]
            kept = next(index for index in range(count + 1) if len("".join(texts[:index])) >= len(text))
            return None if texts[kept] == "" else Ending(answer.token_ids[:kept], text, "stop")
    return Ending(answer.token_ids, answer.text, answer.finish_reason)


def cut_at_stop_token(answer: Completion, stop: int) -> Ending:
    """The tokens up to the first that is ``stop``, and the text of those before it."""
    count = answer.token_ids.index(stop) + 1
    texts = [token.text for piece in answer.pieces for token in piece.tokens]
    return Ending(answer.token_ids[:count], "".join(texts[: count - 1]), "stop")


def stop_texts(answer: Completion) -> list[tuple[str, ...]]:
    """Stop texts to try on an answer: inside a token, over the edges of tokens, several at once, and near misses."""
    text, edges, at = answer.text, [], 0
    for piece in answer.pieces:
        for token in piece.tokens:
            at += len(token.text)
            edges.append(at)
    found: list[tuple[str, ...]] = []
    for edge in edges[1:12:4]:
        over = text[max(edge - 2, 0) : edge + 2]
        found += [(over,), (text[edge : edge + 1],), (text[max(edge - 1, 0) : edge + 9],)]
        # Of two, the later one is complete first; and one that only begins must not hold anything back at the end.
        found.append((text[max(edge - 2, 0) : edge + 9], text[edge + 1 : edge + 3]))
        found.append((over + _NEVER,))
    found.append((text[-3:] + _NEVER,))
    return list(dict.fromkeys(stops for stops in found if all(stops)))


def _whole(text: str) -> str:
    """Without a character at the end of which an answer that ends there has only some bytes."""
    return text.rstrip("\ufffd")
