"""``pilotfish health``: does a service answer? For containers and scripts."""

from __future__ import annotations

from typing import Annotated

import typer


def health(
    address: Annotated[str, typer.Argument(metavar="[HOST:]PORT", help="Of a target, a draft or an orchestrator.")],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Give up after so long.")] = 5.0,
) -> None:
    """Ask any of the three services whether it serves; exits with 0 if it does.

    [dim]$ pilotfish health 127.0.0.1:50050[/]
    """
    from pilotfish.client.health import check

    check(address, timeout)
    print("serving")
