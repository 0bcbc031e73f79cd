"""What a round did, for clients that ask with ``show_tokens``: the tokens' origins, times, and the proposal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.core.rounds import Judged
from orchestrator.http.logprobs import token_text
from orchestrator.outputs import Piece
from orchestrator.tokenizer import Tokenizer


def round_of(piece: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields as in ``Piece`` of generation.proto; ``proposal`` is null where nothing was drafted."""
    tokens = [
        {"id": token_id, "text": text, "kind": kind.name.lower()}
        for token_id, text, kind in zip(piece.token_ids, piece.token_texts, piece.kinds, strict=True)
    ]
    return {
        "tokens": tokens,
        "drafted": piece.drafted,
        "accepted": piece.accepted,
        "times": asdict(piece.times),
        "proposal": None if piece.judged is None else _proposal(piece.judged, tokenizer),
    }


def _proposal(judged: Judged, tokenizer: Tokenizer) -> dict[str, Any]:
    """Nodes in order, each behind its parent; -1 is the root, the last token there was."""
    nodes = zip(judged.proposal.token_ids.tolist(), judged.proposal.parents.tolist(), strict=True)
    return {
        "nodes": [
            {"id": token_id, "text": token_text(tokenizer, token_id), "parent": parent} for token_id, parent in nodes
        ],
        "accepted": [int(node) for node in judged.path],
    }
