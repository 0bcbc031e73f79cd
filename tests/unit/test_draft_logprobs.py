"""What a proposal tells of the law that it was drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.core.logprobs import draft_logprobs
from orchestrator.core.proposals import EMPTY, Proposal
from pilotfish.client.results import _piece_from_pb
from pilotfish.errors import InternalError
from pilotfish.steps import Supports
from pilotfish.v1 import generation_pb2 as pb


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


TREE = Proposal(
    token_ids=ints(5, 7, 2),
    parents=ints(-1, -1, 1),
    supports=Supports(ints(3, 0, 2, 0), ints(9, 7, 5, 3, 2)),
    support_probs=np.array([0.2, 0.5, 0.3, 0.6, 0.4]),
)
"""Two children of the root, and one of the second."""


def test_each_node_tells_of_the_law_of_its_parent() -> None:
    found = draft_logprobs(TREE, 2)
    assert [math.exp(each.logprob) for each in found] == pytest.approx([0.3, 0.5, 0.4])
    assert [[token_id for token_id, _ in each.top] for each in found] == [[7, 5], [7, 5], [3, 2]]
    assert [math.exp(logprob) for _, logprob in found[2].top] == pytest.approx([0.6, 0.4])
    assert [len(each.top) for each in draft_logprobs(TREE, 20)] == [3, 3, 2]
    assert [each.top for each in draft_logprobs(TREE, 0)] == [(), (), ()]


def test_what_was_not_drawn_from_a_law_tells_nothing() -> None:
    assert draft_logprobs(EMPTY, 20) == ()
    assert draft_logprobs(Proposal(ints(5, 7), ints(-1, 0), Supports(ints(0, 0, 0))), 20) == ()


def test_a_client_refuses_other_than_one_for_each_node() -> None:
    proposal = pb.Proposal(token_ids=[5, 7], parents=[-1, 0], logprobs=[pb.TokenLogprobs(logprob=-1.0)])
    with pytest.raises(InternalError, match="2 drafted tokens, 1 logprobs"):
        _piece_from_pb(pb.Piece(proposal=proposal))
    proposal.logprobs.append(pb.TokenLogprobs(logprob=-2.0, top_token_ids=[7], top_logprobs=[-2.0]))
    told = _piece_from_pb(pb.Piece(proposal=proposal)).proposal
    assert told is not None
    assert [each.logprob for each in told.logprobs] == [-1.0, -2.0]
