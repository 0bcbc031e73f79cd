"""``pilotfish target``, ``draft`` and ``orchestrator``: the services, each with its own options."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import typer

from pilotfish import extras


def _forward(module: str, argv: list[str]) -> None:
    """Runs a service's own main, which parses ``argv`` and serves until it is stopped."""
    extras.require("serve", f"pilotfish {module.partition('.')[0].removesuffix('_svc')}")
    raise typer.Exit(importlib.import_module(module).main(argv) or 0)


def target(context: typer.Context) -> None:
    """Serve the target model. Options: [bold]pilotfish target --help[/]."""
    _forward("target_svc.server", context.args)


def draft(context: typer.Context) -> None:
    """Serve a draft model. Options: [bold]pilotfish draft --help[/]."""
    _forward("draft_svc.server", context.args)


def orchestrator(context: typer.Context) -> None:
    """Serve clients with a target and drafts. Options: [bold]pilotfish orchestrator --help[/]."""
    _forward("orchestrator.server", context.args)


COMMANDS: dict[str, Callable[[typer.Context], None]] = {
    "target": target,
    "draft": draft,
    "orchestrator": orchestrator,
}
