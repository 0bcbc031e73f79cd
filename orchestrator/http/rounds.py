"""What a round did, for clients that ask with ``show_tokens``: the tokens' origins, times, and the proposal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.outputs import Piece


def round_of(piece: Piece) -> dict[str, Any]:
    """Fields as in ``Piece`` of generation.proto."""
    tokens = [
        {"id": token_id, "text": text, "kind": kind.name.lower()}
        for token_id, text, kind in zip(piece.token_ids, piece.token_texts, piece.kinds, strict=True)
    ]
    return {"tokens": tokens, "drafted": piece.drafted, "times": asdict(piece.times)}
