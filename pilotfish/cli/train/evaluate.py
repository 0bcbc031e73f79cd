"""``pilotfish train evaluate``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pilotfish.cli.console import stdout
from pilotfish.cli.pull import fetch
from pilotfish.cli.train.shared import Dtype, TargetModel, Threads, evaluating, use_threads

if TYPE_CHECKING:
    from draft_svc.training.evaluate import Evaluation


def evaluate(
    head: Annotated[Path, typer.Option(metavar="DIR", help="Head or draft model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Captured text.")],
    target_model: TargetModel = "smollm2",
    draft_length: Annotated[int, typer.Option(metavar="K", min=1, help="Draft tokens of a chain.")] = 4,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens from one chain to the next.")] = 8,
    anchors: Annotated[int, typer.Option(metavar="N", min=1, help="Chains at each temperature, at most.")] = 4000,
    all_documents: Annotated[
        bool, typer.Option("--all", metavar="", help="Judge on all documents, those trained on included.")
    ] = False,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one object.")] = False,
) -> None:
    """Judge a head by the code that will serve it, on documents it has not seen.

    No service is started: captured answers are played to the drafter,
    which drafts at every few tokens of them. For speed, and for other
    prompts than those captured, measure a running deployment:
    [bold]pilotfish bench[/].

    [dim]$ pilotfish train evaluate --head heads/mtp --data data[/]
    """
    from draft_svc.training.evaluate import EvaluationConfig
    from draft_svc.training.evaluate import evaluate as run

    config = EvaluationConfig(length=draft_length, every=every, anchors=anchors, held_out=not all_documents)
    use_threads(threads)
    with evaluating(2 * anchors) as on_anchor:
        found = run(head, fetch(target_model), data, config, dtype=dtype, on_anchor=on_anchor)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    stdout.print(_table(found))
    if found.greedy_tokens_per_round is not None:
        stdout.print(f"greedy: [bold]{found.greedy_tokens_per_round:.2f}[/] tokens per round of {draft_length} drafts")
    if found.expected_tokens_per_round is not None:
        stdout.print(f"temperature 1: [bold]{found.expected_tokens_per_round:.2f}[/] tokens per round expected")


def _table(found: Evaluation) -> Table:
    """A row for each draft step."""
    table = Table(title=f"{found.drafter} on {found.documents} documents", title_justify="left")
    for name in ("draft step", "judged", "accepted", "judged", "expected", "loss", "top-1", "top-5"):
        table.add_column(name, justify="right", style="green" if name in ("accepted", "expected") else "")
    for index in range(max(len(found.greedy), len(found.sampled))):
        greedy = found.greedy[index] if index < len(found.greedy) else None
        sampled = found.sampled[index] if index < len(found.sampled) else None
        table.add_row(
            str(index + 1),
            *(("–", "–") if greedy is None else (f"{greedy.judged}", f"{greedy.accepted:.1%}")),
            *(
                ("–",) * 5
                if sampled is None
                else (
                    f"{sampled.judged}",
                    f"{sampled.expected_acceptance:.1%}",
                    f"{sampled.loss:.2f}",
                    f"{sampled.top1:.1%}",
                    f"{sampled.top5:.1%}",
                )
            ),
        )
    table.caption = "accepted: greedily, of those whose earlier drafts were; the rest at temperature 1"
    return table
