"""What the load generator saw: one record a request, one pass each time that all of them were asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pilotfish.client.results import Completion


@dataclass(frozen=True)
class Load:
    """How requests come: so many at a time, the next one once one has ended; or at random moments, come what may."""

    concurrency: int | None = None
    """Requests at a time (a closed loop)."""
    rate: float | None = None
    """Requests a second, as a Poisson process (an open loop)."""

    @property
    def number(self) -> str:
        return f"{self.concurrency if self.rate is None else self.rate:g}"

    @property
    def label(self) -> str:
        return f"{self.number} {'at once' if self.rate is None else 'a second'}"


@dataclass(frozen=True)
class Setting:
    """One cell of the sweep."""

    load: Load
    temperature: float
    draft_length: int | None
    """Most draft tokens a round; 0 is speculation off, None what the server chooses from round to round."""

    @property
    def draft_label(self) -> str:
        if self.draft_length is None:
            return "auto"
        return str(self.draft_length) if self.draft_length else "off"


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds since its pass began."""

    began_at: float
    """When it was sent; in an open loop when it was due, so that a late sender does not hide a wait."""
    arrivals: tuple[tuple[float, int], ...]
    """(time, tokens) of each piece."""
    ended_at: float
    completion: Completion | None = None
    """None if it failed."""
    error: str | None = None


@dataclass(frozen=True)
class Pass:
    """All requests asked once under one setting, in the order of the prompts."""

    records: tuple[Record, ...]
    duration_s: float
    """From the first request to the end of the last."""
    cpu_s: float
    """What the load generator itself used of a core."""

    @property
    def completions(self) -> list[Completion]:
        """Of the requests that did not fail."""
        return [record.completion for record in self.records if record.completion is not None]
