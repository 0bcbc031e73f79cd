"""Answers for tests of what ``pilotfish check`` judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pilotfish import Completion, Piece, RoundTimes, ServerInfo, Token, Usage

TIMES = RoundTimes(4, 3, 2, 1)
INFO = ServerInfo(
    model="tiny", version="1", max_len=64, vocab_size=50, draft_length=4, adaptive_draft_length=False,
    draft_replica_count=1, draft_model="d", target_ready=True,
)  # fmt: skip


def answer(
    *rounds: Sequence[tuple[int, str, Any]], reason: Any = "length", drafted: int = 0, **usage: Any
) -> Completion:
    """A completion of rounds of tokens (id, text, kind's first letter), so many drafted in each."""
    kinds = {"a": "accepted", "r": "recovered", "b": "bonus"}
    pieces = tuple(
        Piece(tuple(Token(token_id, text, kinds[kind]) for token_id, text, kind in tokens), drafted, TIMES)  # type: ignore[arg-type]
        for tokens in rounds
    )
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    counts: dict[str, Any] = {
        "prompt_tokens": 3, "completion_tokens": len(token_ids), "cached_tokens": 0, "rounds": len(rounds),
        "drafted": drafted * len(rounds), "accepted": sum(kind == "accepted" for p in pieces for kind in p.kinds),
        "accepted_per_position": (), "drafted_per_position": (), "queue_us": 1, "first_token_us": 1, "total_us": 1,
        "round_total": TIMES, "round_median": TIMES, "preemptions": 0,
    }  # fmt: skip
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=token_ids,
        finish_reason=reason,
        usage=Usage(**(counts | usage)),
        request_id="r",
        model="tiny",
        pieces=pieces,
    )


def words(*texts: str, reason: Any = "length") -> Completion:
    """One token a round: ids from 0 in the order in which texts first come."""
    ids = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    return answer(*([(ids[text], text, "b")] for text in texts), reason=reason)
