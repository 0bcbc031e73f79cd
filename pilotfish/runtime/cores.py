"""Cores that the workers of one host lend each other while they wait.

Target and draft take turns, so that each could use all cores; but now and then both compute, and two processes whose
threads outnumber the cores slow each other many times over. So workers that name the same file write there when they
compute, and take for every layer the threads of those that do not.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from pilotfish.cores import usable_cores
from pilotfish.errors import OverloadedError

_SLOTS = 64
_FIELDS = 3  # process id, or 0; its threads; whether it computes


class SharedCores:
    """One worker's part in a file of several.

    Args:
        path: the file; made if it is not there.
        threads: that this worker may use whatever the others do.
        cores: most threads that are ever of use.
        process: id of this process.

    Raises:
        OverloadedError: too many workers share the file.
    """

    def __init__(self, path: Path, threads: int, cores: int, process: int) -> None:
        self._threads, self._cores, self._process = threads, cores, process
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one registers at a time
            file.truncate(_SLOTS * _FIELDS * 8)
            self._table = np.memmap(path, np.int64, "r+", shape=(_SLOTS, _FIELDS))
            free = (slot for slot, (owner, *_) in enumerate(self._table.tolist()) if not _is_alive(owner))
            slot = next(free, None)
            if slot is None:
                raise OverloadedError(f"share_cores is {path}, which {_SLOTS} workers use already; take another file")
            self._own = self._table[slot]
            self._own[:] = process, threads, 0

    def threads(self) -> int:
        """How many to use now."""
        idle, working = 0, 1
        for process, threads, is_working in self._table.tolist():
            if process in (0, self._process):
                continue
            if is_working and _is_alive(process):
                working += 1
            else:
                idle += threads
        return min(self._threads + idle // working, self._cores)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Takes the lent cores back while the block runs."""
        self._own[2] = 1
        try:
            yield
        finally:
            self._own[2] = 0


_shared: SharedCores | None = None


def share(path: Path, threads: int) -> None:
    """Lets this process lend and borrow; called once, as it starts."""
    global _shared
    _shared = SharedCores(path, threads, usable_cores(), os.getpid())


def threads() -> int:
    """Threads for the next piece of work: torch's, and what is lent."""
    return torch.get_num_threads() if _shared is None else _shared.threads()


@contextmanager
def working() -> Iterator[None]:
    """Tells the others that this process computes while the block runs."""
    if _shared is None:
        yield
        return
    with _shared.working():
        yield


def _is_alive(process: int) -> bool:
    if process == 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
