"""How a run is made."""

from __future__ import annotations

from dataclasses import dataclass

LABORATORY = "laboratory"
"""Name of the check that asks two tiny models instead of the deployment."""

QUICK_S = 120.0
"""Budget of a quick run, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a user chooses of a run."""

    seed: int = 0
    """Every seed that requests carry comes from it."""
    budget_s: float | None = None
    """Seconds that the run may take: the checks share them out, and ask less or more. None asks everything in full."""
    false_alarms: float = 0.001
    """Probability that a sound deployment fails any statistical test of the run."""
    near_tie: float = 0.05
    """Logits that are no farther apart may change places by rounding, in float32 seldom, in bfloat16 often."""
    concurrency: int = 32
    """Most requests at once."""
    timeout_s: float | None = None
    """Of each request; None waits for ever."""
