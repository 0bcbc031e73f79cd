"""``pilotfish train``: from a target's own text to a head that drafts for it."""

from __future__ import annotations

import typer

from pilotfish.cli.train.capture import capture
from pilotfish.cli.train.demo import demo
from pilotfish.cli.train.evaluate import evaluate
from pilotfish.cli.train.export import export
from pilotfish.cli.train.fit import fit
from pilotfish.cli.train.prompts import prompts

app = typer.Typer(
    name="train",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train a drafter for your own target: [bold]capture[/], [bold]fit[/], [bold]evaluate[/].",
    epilog="docs/training.md tells the whole way.",
)
for _command in (prompts, capture, fit, evaluate, export):
    app.command(rich_help_panel="In this order")(_command)
app.command(rich_help_panel="All of it, in small")(demo)
