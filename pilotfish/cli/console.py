"""Where the commands print: answers to stdout, everything about them to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.text import Text

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Tells in passing."""
    stderr.print(Text(text, style="dim"), soft_wrap=True)


def complain(text: str) -> None:
    """Tells of something that went wrong."""
    stderr.print(Text(text, style="red"), soft_wrap=True)


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
