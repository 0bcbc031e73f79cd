"""A server for the time of one command: ``pilotfish up`` as a child, on a free port."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

import typer
from rich.text import Text

from pilotfish import extras
from pilotfish.cli.children import die_with_parent
from pilotfish.cli.console import stderr, waiting
from pilotfish.errors import UnavailableError

INTERRUPTED = 130  # exit code, as of a command that Ctrl-C ends


def up_flags(text: str) -> list[str]:
    """The flags that ``--up`` gives as one text.

    Raises:
        typer.BadParameter: a quotation mark is missing, or the like.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"--up is {text!r}, which is no command line ({error})") from error


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[str]:
    """Runs ``pilotfish up`` with these flags while the block runs; yields its address.

    Raises:
        FailedPreconditionError: the services are not installed.
        UnavailableError: it did not start; the message has what it said.
    """
    with running_servers(flags) as [address]:
        yield address


@contextmanager
def running_servers(*flags: Sequence[str]) -> Iterator[list[str]]:
    """Several at once, each with its own flags; yields their addresses in the same order.

    Raises:
        FailedPreconditionError: the services are not installed.
        UnavailableError: one did not start; the message has what it said.
    """
    extras.require("serve", "a server of its own")
    with ExitStack() as stack:
        started = [stack.enter_context(_started(each)) for each in flags]
        yield [_address(*each) for each in started]


_Started = tuple["subprocess.Popen[str]", list[str], IO[bytes]]


@contextmanager
def _started(flags: Sequence[str]) -> Iterator[_Started]:
    """A process, its command line, and what it says on stderr."""
    argv = [sys.executable, "-P", "-m", "pilotfish", "up", "--listen", "127.0.0.1:0", "--http", "off", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process, which then stops that one
            preexec_fn=die_with_parent(),
        )
        try:
            yield process, argv, log
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[str], argv: list[str], log: IO[bytes]) -> str:
    assert process.stdout is not None
    with waiting() as report:
        report(f"starting target, draft and orchestrator: {' '.join(argv[3:])}")
        line = process.stdout.readline()
    if not line.startswith("ready "):
        process.wait()
        log.seek(0)
        raise UnavailableError(f"`pilotfish up` did not start:\n{log.read().decode(errors='replace').strip()}")
    stderr.print(Text(line.strip(), style="dim"), soft_wrap=True)
    return line.split()[1]
