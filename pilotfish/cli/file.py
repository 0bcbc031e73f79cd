"""Options of a command from a TOML file: ``--config FILE``, with keys named like the flags."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer


def _read(context: typer.Context, file: Path | None) -> Path | None:
    """Makes the file's values the defaults of the command; flags and variables win over them.

    Raises:
        typer.BadParameter: the file is no TOML, or a key or value is none of the command's.
    """
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file} cannot be read as TOML: {error}") from error
    known = {str(param.name): param for param in context.command.params if param.name not in ("config", "help")}
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{key} in {file} is no option of {context.info_name}{hint}")
        _require_fitting(context, known[key], key, value, file)
    context.default_map = values
    return file


def _require_fitting(context: typer.Context, option: Any, key: str, value: object, file: Path) -> None:
    try:
        option.process_value(context, value)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{key} in {file}: {error.message}") from error


config_option = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_read,
        is_eager=True,
        help="TOML file with options: draft_length = 4. Flags and variables win over it.",
    ),
]
