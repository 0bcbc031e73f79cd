"""A grammar that takes long to compile, and what its process does."""

from __future__ import annotations

import json
import os
from pathlib import Path

from waiting import eventually

from pilotfish.runtime.grammar import Grammars

SLOW = {
    "type": "object",
    "properties": {f"p{index}": {"type": "string"} for index in range(1000)},
    "minProperties": 200,
    "maxProperties": 600,
}
"""A rule for every count of properties before every property: half a minute and more."""
SLOW_TEXT = json.dumps(SLOW)


def pids(grammars: Grammars) -> list[int]:
    """Processes that compile grammars now."""
    return [pid for job in list(grammars._running) if (pid := job.compilation.pid) is not None]


def only_pid(grammars: Grammars) -> int:
    """The one process, once it compiles."""
    assert eventually(lambda: len(pids(grammars)) == 1)
    return pids(grammars)[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, now or soon."""

    def is_away() -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (ProcessLookupError, FileNotFoundError):
            return True

    return eventually(is_away)
