"""What a measurement says of itself and of what it found, as one value, and as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pilotfish.bench.origin import Origin
from pilotfish.bench.summary import Result

SCHEMA = 1  # raised when a field of the JSON changes its name or meaning


@dataclass(frozen=True)
class Report:
    """A measurement."""

    origin: Origin
    prompts: str
    """What was asked."""
    requests: int
    """Of a pass."""
    repeats: int
    max_tokens: int
    seed: int
    results: Sequence[Result]
    notes: Sequence[str] = ()
    """What else a reader should know."""

    @property
    def draft(self) -> str:
        return self.origin.server.draft_model or "no draft"

    @property
    def title(self) -> str:
        """What was measured."""
        model = self.origin.server.model
        return f"{model} at {self.origin.address}" if self.origin.is_foreign else f"{model} with {self.draft}"

    def as_json(self) -> str:
        """The whole of it; latencies in milliseconds, with their percentiles from 0 to 100."""
        fields = asdict(self)
        value = {"schema": SCHEMA, **fields.pop("origin"), **fields}
        return json.dumps(value, indent=1, default=_plain, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
