"""How many KV pages fit: what memory is free, what workers take of it, and who gets what."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import load_head, medusa
from tiny_heads import FORMATS
from tiny_models import make_tiny_llama
from torch import Tensor

from draft_svc.drafters import needs as draft_needs
from draft_svc.server import DraftConfig
from pilotfish.cli import memory as sharing
from pilotfish.cli.plan import Model, Plan
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime import memory, worker
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_budget import CPU_AUTO_BYTES, MAX_ROWS, Need, decide
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.memory import Memory, cpu_memory
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.weights import load_weights
from target_svc import needs as target_needs
from target_svc.server import TargetConfig

GB = 10**9
BIG = Need(weights_bytes=16 * GB, page_bytes=2_000_000, max_len=131_072)
SMALL = Need(weights_bytes=1 * GB, page_bytes=500_000, max_len=131_072)


# What is free


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0")
    return tmp_path / "proc"


def group(folder: Path, names: tuple[str, str, str], limit: object, used: int, reclaimable: int) -> None:
    for name, value in zip(names, (limit, used, f"anon 1\n{names[2]} {reclaimable}"), strict=True):
        write(folder / (name if name != names[2] else "memory.stat"), value)


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_control_groups_the_machine_s_memory_counts(proc: Path, tmp_path: Path) -> None:
    assert cpu_memory(proc, tmp_path / "none") == Memory(total=8000 << 10, free=6000 << 10)
    write(proc / "self/cgroup", "0::/")
    assert cpu_memory(proc, tmp_path / "none") == Memory(total=8000 << 10, free=6000 << 10)


def test_the_tightest_control_group_counts_and_file_caches_in_it_are_free(proc: Path, tmp_path: Path) -> None:
    cgroups = tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/pod/container")
    group(cgroups / "pod", V2, 3_000_000, 2_500_000, 100_000)
    group(cgroups / "pod/container", V2, 2_000_000, 500_000, 300_000)
    assert cpu_memory(proc, cgroups) == Memory(total=2_000_000, free=600_000)
    group(cgroups / "pod", V2, "max", 2_500_000, 0)
    assert cpu_memory(proc, cgroups) == Memory(total=2_000_000, free=1_800_000)


def test_the_first_version_of_control_groups_is_read_too(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "5:devices:/x\n4:memory:/docker/abc\n0::/")
    folder = tmp_path / "cgroup/memory"
    group(folder, V1, 9223372036854771712, 10**9, 0)  # no limit
    assert cpu_memory(proc, tmp_path / "cgroup").free == 6000 << 10
    # In a container the group's own path is not mounted, and its files lie at the root.
    group(folder, V1, 4_000_000, 1_000_000, 0)
    assert cpu_memory(proc, tmp_path / "cgroup") == Memory(total=4_000_000, free=3_000_000)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"device is 'cuda:99', but this machine has \d GPUs"):
        memory.gpu_memories([99])


# What is taken


def bytes_of(*values: object) -> int:
    """Of all tensors in these, in attributes and lists of attributes."""
    tensors: dict[int, int] = {}
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Tensor):
                tensors[each.data_ptr()] = each.nbytes
    return sum(tensors.values())


def cache_bytes(cache: KVCache) -> int:
    return bytes_of(cache._kv, cache.token_ids, cache.features)


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"layers": 2}, {"features": "hidden.1,final"}, {"page_size": 8}]
)
def test_a_target_s_need_is_what_it_then_takes(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = make_tiny_llama(tmp_path, layers=3, seed=1)
    config = TargetConfig(model=folder, pages=5, **({"dtype": "float32"} | settings))
    need = target_needs.need_of(config, "cpu")
    model = load_model(folder, dtype=config.dtype, device="cpu", layers=config.layers)
    paged = PagedModel(model, pages=5, page_size=config.page_size, features=config.feature_names)
    assert need.page_bytes * 5 == cache_bytes(paged.cache)
    assert need.max_len == model.config.max_len
    loaded = load_weights(folder, model.config, model.decoder.dtype, torch.device("cpu"))
    assert need.weights_bytes == sum(tensor.nbytes for tensor in loaded.values())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_head_s_need_is_what_it_then_takes(tmp_path: Path, name: str) -> None:
    target = make_tiny_llama(tmp_path / "target", layers=3, seed=1)
    head = FORMATS[name].write(tmp_path / "head")
    settings = {"model": head, "target_model": target, "pages": 3, "dtype": "float32", "device": "cpu"}
    try:
        drafter: Any = load_head(head, target, pages=3)
    except InvalidArgumentError:
        pytest.skip("was made for another target than the tiny one")
    need = draft_needs.need_of(DraftConfig.model_validate(settings), "cpu")
    assert need.page_bytes * 3 == sum(map(cache_bytes, drafter._modules._caches))
    assert 0 < need.weights_bytes < 10_000_000


def test_medusa_keeps_token_ids_alone(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target", layers=3, seed=1)
    head = medusa(tmp_path / "head", target)
    drafter: Any = load_head(head, target, pages=3)
    need = draft_needs.need_of(DraftConfig(model=head, target_model=target, dtype="float32"), "cpu")
    assert need.page_bytes * 3 == drafter._token_ids.nbytes


def test_memory_that_is_gone_by_then_is_told_in_words(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_llama(tmp_path, layers=3, seed=1))
    with pytest.raises(FailedPreconditionError, match="pages is 1,000,000,000,000, and cpu has no longer the memory"):
        KVCache(config, pages=10**12, page_size=16, dtype=torch.float32, device=torch.device("cpu"))


# Who gets what


def test_a_gpu_is_filled_up_to_its_share() -> None:
    found = decide("auto", [BIG, SMALL], Memory(80 * GB, 79 * GB), device="cuda", utilization=0.9)
    assert found.pages == (72 - 17) * GB // 2_500_000
    half = decide("auto", [BIG], Memory(80 * GB, 40 * GB), device="cuda", utilization=0.9)
    assert half.pages == (40 - 16) * GB // 2_000_000


def test_a_cpu_is_half_left_to_others_and_more_than_vllm_takes_is_not_taken() -> None:
    assert decide("auto", [SMALL], Memory(64 * GB, 5 * GB), device="cpu").pages == 2 * GB // 500_000
    assert decide("auto", [SMALL], Memory(64 * GB, 60 * GB), device="cpu").pages == CPU_AUTO_BYTES // 500_000


def test_processes_that_are_still_to_start_take_memory_too() -> None:
    before = decide("auto", [SMALL], Memory(8 * GB, 5 * GB), device="cpu", to_start=1).pages
    assert 0 < before < decide("auto", [SMALL], Memory(8 * GB, 5 * GB), device="cpu").pages


def test_no_more_is_taken_than_all_rows_can_fill() -> None:
    tiny = Need(weights_bytes=1000, page_bytes=100, max_len=500)
    assert decide("auto", [tiny], Memory(8 * GB, 5 * GB), device="cpu").pages == MAX_ROWS * 32


def test_what_fits_is_taken_as_it_was_asked() -> None:
    found = decide(4096, [replace(SMALL, max_len=8192)], Memory(24 * GB, 10 * GB), device="cpu")
    assert found.pages == 4096
    text = "KV cache: 4,096 pages = 65,536 tokens, 8.0 requests of 8,192; 2.0 GB of the 10.0 GB that are free"
    assert str(found) == text


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        (10**8, "cpu", r"--pages is 100,000,000, which takes 50.0 TB beside 1.0 GB of weights; 20.0 GB of 24.0 GB are "
         r"free; at most 36,000 pages fit"),
        (36_001, "cpu", "at most 36,000 pages fit"),
        (41_201, "cuda", r"90% may be used \(--gpu-memory-utilization\); at most 38,000 pages fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_most_that_does(asked: int, device: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        decide(asked, [SMALL], Memory(24 * GB, 20 * GB), device=device, name="--pages")
    most = int(message.rpartition("at most ")[2].split()[0].replace(",", ""))
    assert decide(most, [SMALL], Memory(24 * GB, 20 * GB), device=device).pages == most


@pytest.mark.parametrize("asked", ["auto", 1])
def test_a_model_that_does_not_fit_is_refused(asked: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"pages is {asked}, but not one page fits beside 16.0 GB of weights"
    ):
        decide(asked, [BIG], Memory(24 * GB, 12 * GB), device="cpu")


def test_a_worker_by_itself_decides_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_llama(tmp_path, layers=3, seed=1)
    with caplog.at_level(logging.INFO):
        config = worker.decide_pages(TargetConfig(model=folder, device="cpu"), target_needs.need_of)
    assert f"KV cache: {config.page_count:,} pages = {config.page_count * 16:,} tokens, 64.0 requests" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"pages is 1,000,000,000, which takes .*; at most [\d,]+ pages fit"):
        worker.decide_pages(TargetConfig(model=folder, device="cpu", pages=10**9), target_needs.need_of)


# What `up` gives its workers


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    folder = make_tiny_llama(tmp_path / "target", layers=3, seed=1)
    draft = Model("draft", folder, layers=2)
    return Plan(Model("target", folder), draft, "auto", replicas=2, dtype="float32", listen="127.0.0.1:0")


def of_devices(monkeypatch: pytest.MonkeyPatch, **devices: Memory) -> None:
    """A machine with these devices alone; cuda0 is cuda:0."""
    monkeypatch.setattr(sharing, "has_gpu", lambda: len(devices) > 1)
    monkeypatch.setattr(memory, "cpu_memory", lambda: devices["cpu"])
    monkeypatch.setattr(memory, "gpu_memories", lambda indices: {i: devices[f"cuda{i}"] for i in indices})


def taken(plan: Plan, on: str) -> int:
    """Bytes of the pages that the plan gives workers of a device."""
    assert plan.draft is not None
    target = TargetConfig(model=plan.target.folder, dtype="float32")
    draft = DraftConfig(model=plan.target.folder, layers=2, drafter="model", dtype="float32")
    total = (plan.target_pages or 0) * target_needs.need_of(target, on).page_bytes
    return total + sum(plan.draft_pages) * draft_needs.need_of(draft, on).page_bytes


def test_workers_of_one_device_share_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1_340_000_000  # little more than three processes take
    of_devices(monkeypatch, cpu=Memory(8 * GB, free))
    shared, [line] = sharing.with_pages(plan, None)
    assert shared.target_pages is not None
    assert shared.draft_pages == (shared.target_pages,) * 2
    left = 0.95 * free - 3 * (400 << 20)
    assert 0.9 * left < taken(shared, "cpu") < left
    assert line.startswith(f"KV cache: {shared.target_pages:,} pages = ")
    assert line.endswith(", for target and draft-0 and draft-1 on cpu")
    assert "--pages" in shared.target_flags(1)


def test_pages_that_do_not_fit_together_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    of_devices(monkeypatch, cpu=Memory(24 * GB, 20 * GB))
    target = target_needs.need_of(TargetConfig(model=plan.target.folder, dtype="float32"), "cpu")
    alone = int(0.9 * 20 * GB / target.page_bytes)  # fits the target, and not the drafts beside it
    sharing.with_pages(replace(plan, draft=None), alone)
    with pytest.raises(
        InvalidArgumentError, match=r"--pages is [\d,]+, which takes .* at most [\d,]+ pages fit"
    ) as caught:
        sharing.with_pages(plan, alone)
    most = int(str(caught.value).rpartition("at most ")[2].split()[0].replace(",", ""))
    assert sharing.with_pages(plan, most)[0].draft_pages == (most, most)


def test_target_and_drafts_on_devices_of_their_own(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {"cuda0": Memory(GB, 640_000_000), "cuda1": Memory(GB, 635_000_000), "cuda2": Memory(2 * GB, 2 * GB)}
    of_devices(monkeypatch, cpu=Memory(GB, GB), **gpus)
    apart = replace(plan, draft_devices=("cuda:1", "cuda:2"), gpu_memory_utilization=1.0)
    found, told = sharing.with_pages(apart, None)
    assert [line.rpartition("for ")[2] for line in told] == [
        "target on cuda:0",
        "draft-0 on cuda:1",
        "draft-1 on cuda:2",
    ]
    assert found.target_pages is not None
    assert found.draft_pages[0] <= found.draft_pages[1] == found.target_pages  # it has room for more, and no use
    for replica, device in enumerate(("cuda:1", "cuda:2")):
        flags = found.draft_flags(apart.draft, 1, replica)  # type: ignore[arg-type]
        assert flags[flags.index("--device") + 1] == device
        assert flags[flags.index("--pages") + 1] == str(found.draft_pages[replica])
        assert flags[flags.index("--gpu-memory-utilization") + 1] == "1.0"


def test_torch_without_cuda_runs_on_the_cpu_of_a_machine_with_gpus(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(indices: object) -> dict[int, Memory]:
        raise InvalidArgumentError("device is 'cuda:0', but this machine has 0 GPUs that torch can use")

    of_devices(monkeypatch, cpu=Memory(24 * GB, 20 * GB))
    monkeypatch.setattr(sharing, "has_gpu", lambda: True)
    monkeypatch.setattr(memory, "gpu_memories", none)
    assert "on cpu" in sharing.with_pages(plan, None)[1][0]
    with pytest.raises(InvalidArgumentError, match="this machine has 0 GPUs"):
        sharing.with_pages(replace(plan, target_device="cuda"), None)


def test_pages_of_the_environment_stay(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    of_devices(monkeypatch, cpu=Memory(24 * GB, 20 * GB))
    monkeypatch.setenv("PILOTFISH_TARGET_PAGES", "77")
    found, told = sharing.with_pages(plan, None)
    assert (found.target_pages, found.draft_pages, told) == (None, (), [])
    assert sharing.with_pages(plan, 40)[0].target_pages == 40  # flags win
