"""Where the commands print: answers to stdout, everything about them to stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol, cast

from rich.console import Console
from rich.text import Text

from pilotfish.logs import as_json

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Tells in passing."""
    stderr.print(Text(text, style="dim"), soft_wrap=True)


def complain(text: str) -> None:
    """Tells of something that went wrong."""
    if (lines := json_lines()) is not None:
        lines.say("error", text)
        return
    stderr.print(Text(text, style="red"), soft_wrap=True)


class JsonLines(io.TextIOBase):
    """A file that makes each line written to it a JSON object on stderr.

    Args:
        service: whose lines they are.
    """

    def __init__(self, service: str) -> None:
        self._service, self._begun = service, ""

    def write(self, text: str) -> int:
        """Tells every line that is whole."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self.say("info", line)
        return len(text)

    def say(self, level: str, message: str, service: str | None = None) -> None:
        """Makes a line of a message, which may have several."""
        self.pass_on(as_json(level, message, service=service or self._service))

    def pass_on(self, line: str) -> None:
        """Writes a line that is JSON already."""
        print(line, file=sys.stderr, flush=True)


def speak_json(service: str) -> None:
    """From now on all that goes to stderr is JSON, an object a line: no colours, and nothing that moves."""
    stderr.file = cast("IO[str]", JsonLines(service))


def json_lines() -> JsonLines | None:
    """Where stderr's lines become JSON; None if they do not."""
    return stderr.file if isinstance(stderr.file, JsonLines) else None


class Report(Protocol):
    """Told what is being done."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


@contextmanager
def waiting() -> Iterator[Report]:
    """Shows on stderr what a long block is doing, as the block reports it.

    In a terminal a spinner with a count; elsewhere a line for each new thing, and no counts.
    """
    if stderr.is_terminal:
        with stderr.status("") as status:
            yield lambda what, done=0, total=0: status.update(f"{what} {done}/{total}" if total else what)
    else:
        yield _Lines()


class _Lines:
    """Prints what is new."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        if what != self._last:
            stderr.print(Text(what), soft_wrap=True)
        self._last = what
