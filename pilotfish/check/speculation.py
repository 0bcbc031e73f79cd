"""The ways in which a deployment can be asked to speculate. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pilotfish.check.results import Result, skipped
from pilotfish.client.params import Acceptance

if TYPE_CHECKING:
    from pilotfish.check.asking import Asker

Way = Mapping[str, Any]
"""Sampling parameters that choose how to speculate."""

MOST = 64
"""Most draft tokens a round that a request may name (generation.proto)."""
OFF: Way = {"draft_length": 0}
RULES = get_args(Acceptance)


def ways(asker: Asker) -> dict[str, Way]:
    """By name; none without a draft."""
    if asker.info.draft_replica_count == 0:
        return {}
    lengths: dict[str, Way] = {f"draft_length {length}": {"draft_length": length} for length in (1, 4, MOST)}
    return {"draft_length left to the server": {"draft_length": None}, **lengths, **drafters(asker)}


def drafters(asker: Asker) -> dict[str, Way]:
    """The kinds of draft replicas by name, where there are several."""
    kinds = asker.capabilities.drafters
    if len(kinds) < 2:
        return {}
    return {
        f"drafted by {kind.model} ({kind.scheme})": {"draft_length": 4, "draft_model": kind.model} for kind in kinds
    }


def without_draft(asker: Asker) -> Result | None:
    """Why speculation cannot be compared with anything; None if it can."""
    if asker.info.draft_replica_count:
        return None
    return skipped("speculation on and off", "no draft replica answers, so that there is no speculation")
