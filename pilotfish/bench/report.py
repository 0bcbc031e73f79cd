"""What a measurement says of itself and of what it found, as one value, and as JSON. Pure but for ``this_machine``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.bench.summary import Result

if TYPE_CHECKING:
    from pilotfish.client.results import ServerInfo

SCHEMA = 1  # raised when a field of the JSON changes its name or meaning


@dataclass(frozen=True)
class Report:
    """A measurement."""

    server: ServerInfo
    address: str
    started_by: str
    """The command that started the server; empty if it ran already."""
    command: str
    date: str
    """Of its begin, ISO 8601 with the offset to UTC."""
    machine: str
    """That the load generator ran on."""
    prompts: str
    """What was asked."""
    requests: int
    """Of a pass."""
    repeats: int
    max_tokens: int
    seed: int
    results: Sequence[Result]

    @property
    def draft(self) -> str:
        return self.server.draft_model or "no draft"

    def as_json(self) -> str:
        """The whole of it; latencies in milliseconds, with their percentiles from 0 to 100."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, default=_plain, ensure_ascii=False) + "\n"


def this_machine() -> str:
    """Processor, cores and system, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{_processor()}, {cores} core{'' if cores == 1 else 's'}, {system}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown processor")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
