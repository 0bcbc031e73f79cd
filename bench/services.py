"""Services as child processes of a measurement."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Service:
    """A running child, by process id and the address that it serves on."""

    pid: int
    address: str

    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


@contextmanager
def service(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Service]:
    """Runs ``python ARGV`` until the end of the block, once its ``ready`` line has come.

    Args:
        env: added to the environment.
    """
    command = [sys.executable, *argv]
    pipe, environment = subprocess.PIPE, os.environ | (env or {})
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("ready")), "")
        found = re.search(r"\S+:\d+", line)
        if found is None:
            raise SystemExit(f"{' '.join(command)} did not start; run it alone to see why")
        yield Service(process.pid, found.group())
    finally:
        process.terminate()
        process.wait(30)
