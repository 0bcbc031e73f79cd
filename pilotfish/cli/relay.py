"""How ``pilotfish up`` passes on to stderr what its children say."""

from __future__ import annotations

import json

from rich.text import Text

from pilotfish.cli.console import JsonLines, json_lines, stderr

_COLOURS = {"target": "blue", "draft": "magenta", "orchestrator": "green"}
_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


def pass_on(name: str, line: str) -> None:
    """A line of a child: behind its name in its colour, or as JSON that names it."""
    if (lines := json_lines()) is not None:
        _pass_on_json(lines, name, line)
        return
    prefix = (f"{name:>12} │ ", _COLOURS[name.partition("-")[0]])
    style = _STYLES.get(line.partition(":")[0], "")
    stderr.print(Text.assemble(prefix, (line, style)), soft_wrap=True)


def _pass_on_json(lines: JsonLines, name: str, line: str) -> None:
    """With the name that it has here, as several of a kind have numbers; what is no JSON becomes the message of one."""
    if not line.strip():
        return
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        lines.pass_on(json.dumps(found | {"service": name}))
    else:
        lines.say("info", line, name)
