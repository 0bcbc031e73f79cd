"""``pilotfish train demo``: the whole way from a target to a head, in minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.rule import Rule
from rich.table import Table

from pilotfish import extras
from pilotfish.cli.console import note, stdout
from pilotfish.cli.pull import fetch
from pilotfish.cli.train.capture import capture
from pilotfish.cli.train.fit import fit
from pilotfish.cli.train.prompts import prompts
from pilotfish.cli.train.shared import Threads

if TYPE_CHECKING:
    from draft_svc.training.evaluate import Evaluation

_DTYPE: Final = "bfloat16"  # a CPU writes text several times faster in it, many rows at once


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where all goes; what is there already is not made again.")
    ] = None,
    target_model: Annotated[
        str, typer.Option("--target-model", metavar="MODEL", help="Name, Hugging Face id or folder.")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Answer tokens to capture.")] = 24_000,
    visits: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answer tokens to train on, again and again.")
    ] = 200_000,
    draft_vocab: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that the head can draft.")] = 8192,
    threads: Threads = None,
) -> None:
    """Train an MTP head for SmolLM2 from nothing, in ten minutes of two cores.

    The target writes a little text, a head is trained on it, and the code
    that would serve the head judges it before and after. Heads worth
    serving take more of everything: docs/training.md.

    [dim]$ pilotfish train demo[/]
    """
    from pilotfish.checkpoints.store import home

    extras.require("serve", "pilotfish train demo")
    where = out or home() / "train-demo"
    where.mkdir(parents=True, exist_ok=True)
    data, before, after = where / "data", where / "untrained", where / "trained"
    with _stage(f"1 of 4: {target_model} writes, and its states are kept"):
        prompts(where / "prompts.jsonl")
        capture(
            data,
            target_model=target_model,
            prompts=where / "prompts.jsonl",
            ask_itself=0.4,
            tokens=tokens,
            features="final",
            temperatures="0,0,1",
            max_tokens=160,
            rows=48,
            dtype=_DTYPE,
            threads=threads,
        )
    with _stage("2 of 4: a head begins from the target's last layer"):
        fit(data, before, target_model=target_model, visits=1, draft_vocab=draft_vocab, threads=threads)
    with _stage("3 of 4: it learns"):
        fit(data, after, target_model=target_model, visits=visits, draft_vocab=draft_vocab, threads=threads)
    with _stage("4 of 4: judged as it would be served, on documents it has not seen"):
        found = [_evaluate(folder / "head", data, target_model) for folder in (before, after)]
    stdout.print(_table(*found))
    # The states that the head knows are those of this dtype.
    served = f"--target {target_model} --draft {after / 'head'} --dtype {_DTYPE}"
    stdout.print(f"Serve it:\n  pilotfish up {served}", soft_wrap=True)


@contextmanager
def _stage(title: str) -> Iterator[None]:
    """Says what begins, and afterwards how long it took."""
    stdout.print(Rule(title, align="left", style="cyan"))
    began = time.monotonic()
    yield
    note(f"{time.monotonic() - began:.0f} s")


def _evaluate(head: Path, data: Path, target_model: str) -> Evaluation:
    from draft_svc.training.evaluate import EvaluationConfig, evaluate

    return evaluate(head, fetch(target_model), data, EvaluationConfig(anchors=1000), dtype=_DTYPE)


def _table(before: Evaluation, after: Evaluation) -> Table:
    """Greedy acceptance per draft step, and tokens per round."""
    table = Table(title="greedy drafting, chains of 4", title_justify="left")
    for name in ("", "untrained", "trained"):
        table.add_column(name, justify="right" if name else "left", style="green" if name == "trained" else "")
    for step in range(max(len(before.greedy), len(after.greedy))):
        shares = (found.greedy[step].accepted if step < len(found.greedy) else None for found in (before, after))
        table.add_row(f"draft token {step + 1} accepted", *(_number(share, "{:.0%}") for share in shares))
    rounds = (found.greedy_tokens_per_round for found in (before, after))
    table.add_row("tokens per round", *(_number(value, "{:.2f}") for value in rounds))
    expected = (found.expected_tokens_per_round for found in (before, after))
    table.add_row("at temperature 1, expected", *(_number(value, "{:.2f}") for value in expected))
    return table


def _number(value: float | None, shape: str) -> str:
    return "–" if value is None else shape.format(value)
