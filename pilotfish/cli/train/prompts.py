"""``pilotfish train prompts``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.console import note
from pilotfish.errors import InvalidArgumentError


def prompts(
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines to write.")],
    wheel: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Wheel of reasoning-gym, chatterbot-corpus or ifcraftcorpus; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Same sources and seed, same prompts.")] = 0,
) -> None:
    """Write questions for a target to answer, from free sources.

    Templates of our own and the functions of Python's standard library
    are always at hand; wheels of free packages add tasks, small talk and
    passages to sum up. Any file of your users' questions is better.

    [dim]$ pip download --no-deps reasoning-gym chatterbot-corpus ifcraftcorpus[/]
    [dim]$ pilotfish train prompts --out prompts.jsonl --wheel reasoning_gym*.whl[/]
    """
    from draft_svc.training.prompts import gather

    found = gather(wheel or [], seed)
    try:
        out.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--out is {out}, which cannot be written ({error.strerror})") from error
    note(f"wrote {len(found)} prompts to {out}")
