"""Where a report comes from: whom a run asked, from which machine, when, and by which command."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.cores import usable_cores

if TYPE_CHECKING:
    from pilotfish.client.results import ServerInfo


_KEY = "--api-key"


@dataclass(frozen=True)
class Origin:
    """What every report says first."""

    server: ServerInfo
    address: str
    started_by: str
    """The command that started the server; empty if it ran already."""
    command: str
    date: str
    """Of the begin, ISO 8601 with the offset to UTC."""
    machine: str
    """That the requests came from."""
    api: str = "gRPC"
    """That they were sent by; OpenAI, if it may be any server, of which only the model's name is known."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(name, value) of the server and of who asked it."""
        served = f"started by `{self.started_by}`" if self.started_by else f"at {self.address}"
        kind = "OpenAI's API" if self.is_foreign else f"Pilotfish {self.server.version},"
        return [("server", f"{kind} {served}"), ("asked from", self.machine)]

    @property
    def is_foreign(self) -> bool:
        """Whether it may be any server."""
        return self.api == "OpenAI"


def of_this_process(server: ServerInfo, address: str, up: str | None, began: datetime, api: str = "gRPC") -> Origin:
    """The origin of a report that this command makes.

    Args:
        server: what it says of itself.
        address: of the server.
        up: flags of the ``pilotfish up`` that started it; None if it ran already.
        began: when, with its time zone.
        api: as in ``Origin``.
    """
    return Origin(
        server=server,
        address=address,
        started_by="" if up is None else shlex.join(["pilotfish", "up", *_without_keys(shlex.split(up))]),
        command=shlex.join(["pilotfish", *_without_keys(sys.argv[1:])]),
        date=began.isoformat(timespec="seconds"),
        machine=this_machine(),
        api=api,
    )


def _without_keys(argv: Sequence[str]) -> Iterator[str]:
    """A command line as others may read it, also where a part of it is one itself."""
    before = ""
    for part in argv:
        if before == _KEY:
            yield "…"
        elif part.startswith(f"{_KEY}="):
            yield f"{_KEY}=…"
        elif before == "--up" or part.startswith("--up="):
            flag, flags = ("", part) if before == "--up" else ("--up=", part.removeprefix("--up="))
            yield flag + shlex.join(_without_keys(shlex.split(flags)))
        else:
            yield part
        before = part


def this_machine() -> str:
    """Processor, cores and system, in one line."""
    cores = usable_cores()
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{_processor()}, {cores} core{'' if cores == 1 else 's'}, {system}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown processor")
