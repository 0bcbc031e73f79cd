"""Options that the commands of ``pilotfish train`` share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
