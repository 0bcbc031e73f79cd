"""How the C library hands out large blocks of memory while a model is loaded."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt, from glibc's malloc.h
_MIB = 1 << 20


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Blocks of 1 MiB and more, taken in the block, go back to the system as soon as they are freed.

    Packing reads each matrix and writes another. Left to itself glibc soon takes such blocks from its heap, where what
    was read stays as holes: hundreds of megabytes that the process keeps. Afterwards it works as it would have grown
    used to, keeping what a step frees for the next. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the most that glibc lets it be
        mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
