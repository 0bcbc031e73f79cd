"""What the commands of ``pilotfish train`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pilotfish.cli.console import note, stderr

TargetModel = Annotated[str, typer.Option("--target-model", metavar="MODEL", help="Name, Hugging Face id or folder.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="To compute in; take what it is served in."),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Of torch and kernels. Left out: torch's choice.")
]


def use_threads(threads: int | None) -> None:
    """Lets torch and the kernels take so many."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def evaluating(total: int) -> Iterator[Callable[[], None]]:
    """Counts chains in a bar up to ``total``, of which there may be less; not in a terminal: says so, once."""
    if not stderr.is_terminal:
        note("evaluating")
        yield lambda: None
        return
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("chains"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
