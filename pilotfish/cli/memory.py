"""How many KV pages ``pilotfish up`` gives its workers, those of one device together, before it starts any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.cli.plan import Plan
from pilotfish.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pilotfish.runtime.kv_budget import Need
    from pilotfish.runtime.memory import Memory
    from pilotfish.runtime.worker_config import WorkerConfig


@dataclass(frozen=True)
class Worker:
    """One that shares its device's memory with others.

    Attributes:
        name: for people.
        device: cpu or cuda:N.
        config: as its process will read it.
        need: on that device.
    """

    name: str
    device: str
    config: WorkerConfig
    need: Need


def with_pages(plan: Plan, asked: int | None) -> tuple[Plan, list[str]]:
    """The plan with pages for every worker, and what to tell of them, a line for each device.

    Args:
        plan: of all that is to start.
        asked: pages of each worker; None for as many as fit. Where the environment or a file gives the workers of a
            device a number (PILOTFISH_TARGET_PAGES), they go by that, each by itself.

    Raises:
        PilotfishError: they do not fit, a device is none, or a model cannot be run as asked.
    """
    memories = Memories()
    workers = _workers(plan, memories)
    pages: dict[str, int] = {}
    told = []
    for device in dict.fromkeys(worker.device for worker in workers):
        here = [worker for worker in workers if worker.device == device]
        if asked is None and any(worker.config.pages != "auto" for worker in here):
            continue
        pages[device], line = _share(here, memories.of(device), asked)
        told.append(line)
    of_target, of_drafts = workers[0].device, [worker.device for worker in workers[1:]]
    if not set(of_drafts) <= pages.keys():
        of_drafts = []
    most = pages.get(of_target)
    # More pages than the target has would hold rows that it does not.
    shared = tuple(pages[device] if most is None else min(pages[device], most) for device in of_drafts)
    return replace(plan, target_pages=most, draft_pages=shared), told


class Memories:
    """What devices have left, each asked once."""

    def __init__(self) -> None:
        self._found: dict[str, Memory] = {}

    def of(self, device: str) -> Memory:
        """Of cpu or cuda:N."""
        from pilotfish.runtime.memory import cpu_memory, gpu_memories

        if device not in self._found:
            index = int(device.partition(":")[2] or 0)
            self._found[device] = cpu_memory() if device == "cpu" else gpu_memories([index])[index]
        return self._found[device]

    def resolve(self, device: str) -> str:
        """cpu or cuda:N, of a device as a worker is given it; auto takes a GPU where torch can use one."""
        if device != "auto":
            return "cuda:0" if device == "cuda" else device
        if not has_gpu():
            return "cpu"
        try:
            self.of("cuda:0")
        except InvalidArgumentError:  # torch is built for CPUs
            return "cpu"
        return "cuda:0"


def has_gpu() -> bool:
    """Whether this machine has one, if torch can use it or not."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _workers(plan: Plan, memories: Memories) -> list[Worker]:
    """The target, then the drafts."""
    from draft_svc.drafters import needs as of_drafts
    from draft_svc.server import PROG as DRAFT
    from draft_svc.server import DraftConfig
    from pilotfish.settings import read
    from target_svc import needs as of_targets
    from target_svc.server import PROG as TARGET
    from target_svc.server import TargetConfig

    target = read(TargetConfig, plan.target_flags(threads=1), TARGET)
    where = _device(target, memories)
    workers = [Worker("target", where, target, of_targets.need_of(target, where.partition(":")[0]))]
    for replica in range(plan.replicas if plan.draft is not None else 0):
        assert plan.draft is not None
        draft = read(DraftConfig, plan.draft_flags(plan.draft, 1, replica), DRAFT)
        where = _device(draft, memories)
        name = "draft" if plan.replicas == 1 else f"draft-{replica}"
        workers.append(Worker(name, where, draft, of_drafts.need_of(draft, where.partition(":")[0])))
    return workers


def _device(config: WorkerConfig, memories: Memories) -> str:
    return "cpu" if config.simulate is not None else memories.resolve(config.device)


def _share(workers: Sequence[Worker], memory: Memory, asked: int | None) -> tuple[int, str]:
    """Pages of each of the workers of one device, and what to tell of them."""
    from pilotfish.runtime.kv_budget import decide

    first = workers[0]
    budget = decide(
        "auto" if asked is None else asked,
        [worker.need for worker in workers],
        memory,
        device=first.device.partition(":")[0],
        utilization=first.config.gpu_memory_utilization,
        to_start=len(workers),
        name="--pages",
    )
    names = " and ".join(worker.name for worker in workers)
    return budget.pages, f"{budget}, for {names} on {first.device}"
