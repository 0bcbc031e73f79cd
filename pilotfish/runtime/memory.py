"""How much memory a device has left; imports torch only to ask a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish.errors import FailedPreconditionError, InvalidArgumentError

_UNLIMITED = 1 << 60  # what cgroup v1 says of no limit is larger


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device: of the machine or its container, or of one GPU."""

    total: int
    free: int


def cpu_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """What this process may use: what the machine has available, or its control groups leave.

    Memory that caches of files take counts as free: the kernel gives it up. Where there is no ``/proc``, half of the
    machine's memory is taken for free.
    """
    try:
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        kib = {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1}
        total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for limit, used in _group_limits(proc, cgroups):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return Memory(total, free)


def gpu_memory(index: int) -> Memory:
    """Of the GPU that torch calls ``cuda:index``.

    Raises:
        InvalidArgumentError: there is none of that number.
    """
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        raise InvalidArgumentError(f"device is 'cuda:{index}', but this machine has {count} GPUs that torch can use")
    free, total = torch.cuda.mem_get_info(index)
    return Memory(total, free)


def gpu_memories(indices: Sequence[int]) -> dict[int, Memory]:
    """``gpu_memory`` of several, asked in a process of its own: whoever asks a GPU takes half a gigabyte of it.

    Raises:
        InvalidArgumentError: there is no GPU of one of the numbers.
        FailedPreconditionError: torch cannot tell.
    """
    argv = [sys.executable, "-P", "-m", "pilotfish.runtime.memory", *map(str, indices)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise FailedPreconditionError(f"torch cannot tell how much memory the GPUs have: {said[0]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InvalidArgumentError(answer["error"])
    return {int(index): Memory(*each) for index, each in answer.items()}


def _group_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each control group that this process is in, where there is a limit (v2, then v1)."""
    try:
        entries = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers == "":
            yield from _limits_above(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_above(cgroups / "memory", path, *names)


def _limits_above(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # a namespace hides it, or there is no such controller here
            continue
        if most != "max" and int(most) < _UNLIMITED:
            yield int(most), used - int(stat.get(reclaimable, 0))


def _main(indices: Sequence[str]) -> None:
    try:
        found = {index: gpu_memory(int(index)) for index in indices}
    except InvalidArgumentError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps({index: (memory.total, memory.free) for index, memory in found.items()}))


if __name__ == "__main__":
    _main(sys.argv[1:])
