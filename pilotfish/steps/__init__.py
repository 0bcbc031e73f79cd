"""The steps of the contract as numpy arrays, without a trace of gRPC.

Engines take and return these, the orchestrator's core builds them, and ``pilotfish.rpc.codec``
turns them into messages and back. Shapes and meanings are those of ``protos/pilotfish/v1``. Import from here.
"""

from __future__ import annotations

from pilotfish.steps.arrays import Bytes, Floats, Ints, empty_bytes, empty_floats, empty_ints, require, require_range
from pilotfish.steps.draft import Capabilities, DraftResult, DraftStep, ProposalKind, draft_slots
from pilotfish.steps.grants import Grant
from pilotfish.steps.logprobs import Logprobs, WantedLogprobs
from pilotfish.steps.rows import SamplingRows, Supports, TokenRows
from pilotfish.steps.shaping import (
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_ENDS,
    MAX_WRITTEN_BYTES,
    Grammar,
    GrammarKind,
    ShapingRows,
)
from pilotfish.steps.target import DrawRule, FeatureRule, TargetResult, TargetStep

__all__ = [
    "MAX_GRAMMAR_BYTES",
    "MAX_GRAMMAR_ENDS",
    "MAX_WRITTEN_BYTES",
    "Bytes",
    "Capabilities",
    "DraftResult",
    "DraftStep",
    "DrawRule",
    "FeatureRule",
    "Floats",
    "Grammar",
    "GrammarKind",
    "Grant",
    "Ints",
    "Logprobs",
    "ProposalKind",
    "SamplingRows",
    "ShapingRows",
    "Supports",
    "TargetResult",
    "TargetStep",
    "TokenRows",
    "WantedLogprobs",
    "draft_slots",
    "empty_bytes",
    "empty_floats",
    "empty_ints",
    "require",
    "require_range",
]
