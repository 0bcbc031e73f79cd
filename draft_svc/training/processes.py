"""One process, or one of several that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Process:
    """This process among those that train together."""

    rank: int
    device: torch.device
    """A GPU of its own if the host has one for it, else the CPU."""


@contextmanager
def joined() -> Iterator[Process]:
    """Joins the others while the block runs, by what torchrun put into the environment; alone without it."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = index < torch.cuda.device_count()
    device = torch.device("cuda", index) if has_gpu else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Process(0, device)
        return
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        yield Process(dist.get_rank(), device)
    finally:
        dist.destroy_process_group()
