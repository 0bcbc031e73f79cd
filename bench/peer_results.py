"""What the peers answered, and the tables and numbers that follow from it. No IO."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from rich import box
from rich.table import Table

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Row:
    """A peer under one setting: a row of the table."""

    name: str
    """Begins with "pilotfish" for ours; "hf DTYPE" is what texts are compared with, the first of them speeds too."""
    dtype: str
    command: tuple[str, ...]
    """Starts a process that speaks as ``peer_worker.py`` says."""
    max_batch: int | None = None
    """Most prompts at once; None: any number."""


@dataclass(frozen=True)
class Answer:
    """Tokens of one prompt, and for each the seconds from the question to its arrival."""

    token_ids: tuple[int, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Turn:
    """One peer's answers to prompts that were asked at once, one Answer per prompt."""

    answers: tuple[Answer, ...]

    @property
    def decode_speed(self) -> float:
        """Tokens per second, of all prompts together, from the moment on that each has its first token."""
        start = max(answer.times[0] for answer in self.answers)
        count = sum(time > start for answer in self.answers for time in answer.times)
        return count / (self._end - start)

    @property
    def total_speed(self) -> float:
        """Tokens per second, of all prompts together, from the question on."""
        return sum(len(answer.token_ids) for answer in self.answers) / self._end

    @property
    def _end(self) -> float:
        return max(answer.times[-1] for answer in self.answers)


Results = Mapping[str, Mapping[int, Sequence[Turn]]]
"""[name of the row][prompts at once]: one Turn per repeat. The i-th repeat had the same prompts for every row; a row
that failed has fewer."""


def ratio(turns: Sequence[Turn], base: Sequence[Turn]) -> float | None:
    """Median over the repeats of one's decode speed over the other's in the same repeat; None without both."""
    pairs = list(zip(turns, base, strict=False))
    return statistics.median(one.decode_speed / other.decode_speed for one, other in pairs) if pairs else None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The 1-based position at which two sequences part; None if they are equal."""
    pairs = enumerate(zip_longest(one, other), start=1)
    return next((position for position, (a, b) in pairs if a != b), None)


def differences(turns: Sequence[Turn], base: Sequence[Turn]) -> list[int | None]:
    """For each answer that both gave, where it parts from the other's; None where it does not."""
    return [
        first_difference(one.token_ids, other.token_ids)
        for turn, base_turn in zip(turns, base, strict=False)
        for one, other in zip(turn.answers, base_turn.answers, strict=True)
    ]


def same_text(found: Sequence[int | None]) -> str:
    """Such as ``5 of 6, from 17``: five of six answers are the same; the other parts at its 17th token."""
    others = [position for position in found if position is not None]
    counts = f"{len(found) - len(others)} of {len(found)}"
    return counts + (f", from {min(others)}" if others else "") if found else "–"


def result_table(rows: Sequence[Row], results: Results, batches: Sequence[int], markdown: bool) -> Table:
    """A line per row; speeds are medians over the repeats, ratios medians of each repeat's."""
    table = _table("tokens per second", markdown)
    table.add_column("")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right", style="bold")
        table.add_column("end to end", justify="right")
        table.add_column("× hf", justify="right")
    table.add_column("same as hf", justify="right")
    plain = [row for row in rows if row.name == f"hf {SHORT[row.dtype]}" and row.name in results]
    for row in (row for row in rows if row.name in results):
        speeds = [
            _speeds(results[row.name][batch], results[plain[0].name][batch] if plain else ()) for batch in batches
        ]
        reference = next((base.name for base in plain if base.dtype == row.dtype), row.name)
        found = (
            []
            if reference == row.name
            else [
                difference
                for batch in batches
                for difference in differences(results[row.name][batch], results[reference][batch])
            ]
        )
        cells = [cell for triple in speeds for cell in triple]
        table.add_row(row.name, *cells, same_text(found), style=_colour(row))
    return table


def _speeds(turns: Sequence[Turn], base: Sequence[Turn]) -> tuple[str, str, str]:
    if not turns:
        return "–", "–", "–"
    decode = statistics.median(turn.decode_speed for turn in turns)
    total = statistics.median(turn.total_speed for turn in turns)
    return f"{decode:.1f}", f"{total:.1f}", _times(ratio(turns, base))


def against_table(rows: Sequence[Row], results: Results, batch: int, markdown: bool) -> Table:
    """How many times as fast each row of ours decodes as each of the others: a line per other."""
    measured = [row for row in rows if results.get(row.name, {}).get(batch)]
    ours = [row for row in measured if row.name.startswith("pilotfish")]
    table = _table(f"batch {batch}: so many times as fast as", markdown)
    table.add_column(f"batch {batch}, × …" if markdown else "")
    for row in ours:
        table.add_column(row.name, justify="right", style=_colour(row))
    for other in (row for row in measured if row not in ours):
        turns = [results[row.name][batch] for row in ours]
        table.add_row(other.name, *(_times(ratio(each, results[other.name][batch])) for each in turns))
    return table


def _table(title: str, markdown: bool) -> Table:
    if markdown:
        return Table(box=box.MARKDOWN)
    return Table(box=box.ROUNDED, title=title, title_justify="left")


def _colour(row: Row) -> str | None:
    return "green" if row.name.startswith("pilotfish") else None


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def as_json(rows: Sequence[Row], results: Results, versions: Mapping[str, str], about: Mapping[str, Any]) -> str:
    """Everything that was measured, with ``about`` it first."""
    measured = [
        {
            "name": row.name,
            "dtype": row.dtype,
            "command": row.command,
            "version": versions[row.name],
            "turns": {batch: [asdict(turn)["answers"] for turn in turns] for batch, turns in results[row.name].items()},
        }
        for row in rows
        if row.name in results
    ]
    return json.dumps({**about, "rows": measured}, indent=1, ensure_ascii=False)
