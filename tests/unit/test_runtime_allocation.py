"""Whether memory that loading frees goes back to the system, in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Reads 100 matrices one by one, packs each, and frees what was read, as loading does. Prints what the process takes
# beside the packed ones, in MB.
SCRIPT = """
import re
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from pilotfish.runtime.allocation import returned_when_freed

def resident():
    return int(re.findall(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[0]) / 1e3

first = np.ones(8 << 20, np.uint8)
del first  # from here on glibc takes blocks of up to 8 MB from its heap
before, packed = resident(), []
with CONTEXT():
    read = [np.ones(2 << 20, np.uint8) for _ in range(100)]
    while read:
        packed.append(read.pop(0)[: 1 << 20].copy())
print(resident() - before - sum(each.nbytes for each in packed) / 1e6)
"""


def left_over(context: str) -> float:
    script = SCRIPT.replace("CONTEXT", context)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_what_loading_frees_goes_back_to_the_system() -> None:
    assert left_over("returned_when_freed") < 30
    assert left_over("nullcontext") > 60  # else the process above does not do what loading does
