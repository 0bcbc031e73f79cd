"""What drafters brought, task by task, and the tables that follow from it. No IO."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from pilotfish import Completion
from pilotfish.bench.summary import positions


@dataclass(frozen=True)
class Variant:
    """A drafter and how it is asked to draft: a row of the table."""

    drafter: str
    shape: str
    """Name of the flags of `pilotfish up` that say so: chain, tree."""
    temperature: float


@dataclass(frozen=True)
class TaskResult:
    """One task's answers under one variant."""

    task: str
    requests: int
    output_tokens: int
    rounds: int
    drafted: int
    """Of trees the longest paths."""
    judged: tuple[int, ...]
    """Element i: rounds that had a draft token at depth i + 1 and kept all before it."""
    kept: tuple[int, ...]
    """Element i: rounds that kept it, too."""
    tokens_per_s: float
    """Of all requests together, from the first one sent to the last one's end."""

    @property
    def tokens_per_round(self) -> float:
        """Those that did not draft, having to catch up, count too."""
        return 1 + sum(self.kept) / self.rounds if self.rounds else 1.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Of each draft position, the share that was accepted where those before it were."""
        return tuple(kept / judged for kept, judged in zip(self.kept, self.judged, strict=True))


Results = dict[Variant, list[TaskResult]]


def task_result(task: str, completions: Sequence[Completion], seconds: float) -> TaskResult:
    """Adds up a task's answers."""
    judged, kept = positions(completions)
    output_tokens = sum(completion.usage.completion_tokens for completion in completions)
    return TaskResult(
        task=task,
        requests=len(completions),
        output_tokens=output_tokens,
        rounds=sum(completion.usage.rounds for completion in completions),
        drafted=sum(completion.usage.drafted for completion in completions),
        judged=judged,
        kept=kept,
        tokens_per_s=output_tokens / seconds,
    )


def together(tasks: Sequence[TaskResult]) -> TaskResult:
    """All tasks as one; but the goals are means over tasks: see ``mean_tokens_per_round``."""
    return TaskResult(
        task="all",
        requests=sum(task.requests for task in tasks),
        output_tokens=sum(task.output_tokens for task in tasks),
        rounds=sum(task.rounds for task in tasks),
        drafted=sum(task.drafted for task in tasks),
        judged=_added(task.judged for task in tasks),
        kept=_added(task.kept for task in tasks),
        tokens_per_s=statistics.mean(task.tokens_per_s for task in tasks),
    )


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def mean_tokens_per_round(tasks: Sequence[TaskResult]) -> float:
    return statistics.mean(task.tokens_per_round for task in tasks)


def markdown(results: Results) -> str:
    """Two tables: tokens per round of each task, and acceptance per position over all of them."""
    tasks = list(dict.fromkeys(task.task for found in results.values() for task in found))
    head = ["drafter", "shape", "T"]
    per_task = [[*_names(variant), *_rounds(found, tasks)] for variant, found in results.items()]
    wholes = {variant: together(found) for variant, found in results.items()}
    depth = max((len(whole.acceptance) for whole in wholes.values()), default=0)
    per_position = [
        [*_names(variant), *_shares(whole, depth), f"{whole.drafted / max(whole.rounds, 1):.1f}", f"{whole.rounds}"]
        for variant, whole in wholes.items()
    ]
    positions = [f"{position}" for position in range(1, depth + 1)]
    return "\n".join(
        [
            "Tokens per round:\n",
            table([*head, *tasks, "**mean**", "tok/s"], per_task),
            "\nShare of draft tokens accepted at each position, where those before were:\n",
            table([*head, *positions, "drafted a round", "rounds"], per_position),
        ]
    )


def as_json(results: Results, facts: dict[str, Any]) -> str:
    rows = [
        {**asdict(variant), "tasks": [asdict(task) for task in found], "tokens_per_round": mean_tokens_per_round(found)}
        for variant, found in results.items()
    ]
    return json.dumps({**facts, "results": rows}, indent=1) + "\n"


def from_json(text: str) -> Results:
    """The results of ``as_json``."""
    results = {}
    for row in json.loads(text)["results"]:
        variant = Variant(row["drafter"], row["shape"], row["temperature"])
        results[variant] = [
            TaskResult(**{**task, "judged": tuple(task["judged"]), "kept": tuple(task["kept"])})
            for task in row["tasks"]
        ]
    return results


def _names(variant: Variant) -> list[str]:
    return [variant.drafter, variant.shape, f"{variant.temperature:g}"]


def _rounds(found: Sequence[TaskResult], tasks: Sequence[str]) -> list[str]:
    by_task = {task.task: task for task in found}
    cells = [f"{by_task[task].tokens_per_round:.2f}" if task in by_task else "–" for task in tasks]
    speed = statistics.mean(task.tokens_per_s for task in found)
    return [*cells, f"**{mean_tokens_per_round(found):.2f}**", f"{speed:.0f}"]


def _shares(whole: TaskResult, depth: int) -> list[str]:
    shares = [f"{share:.2f}" for share in whole.acceptance]
    return shares + ["–"] * (depth - len(shares))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
