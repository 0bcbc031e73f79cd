"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Whether a condition holds, now or before patience ends."""
    deadline = time.monotonic() + seconds
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds
