"""Looking at processes from outside, for tests that start real ones (Linux)."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie; it may end between the opening of its file and the reading."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
