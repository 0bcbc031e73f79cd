"""How many KV pages fit: from what workers need for a page and what memory is free. Imports no torch.

Decided before weights are loaded, so that a count that does not fit is refused at once. ``pilotfish up`` decides for
the workers that share a device together, a worker started by itself for itself alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.layer_shapes import expected_shapes
from pilotfish.runtime.memory import Memory

MAX_ROWS = 64
"""Rows of the longest length that ``auto`` makes room for at most: what an orchestrator runs at once by default."""
CPU_AUTO_BYTES = 4 << 30
"""Most that ``auto`` takes of a CPU's memory, which is others' too; vLLM's default there."""
_CPU_AUTO_SHARE = 0.5  # of what weights leave
_CPU_SHARE = 0.95  # more is asking for the kernel's OOM killer
_PROCESS_BYTES = {"cpu": 400 << 20, "cuda": 600 << 20}  # torch and its kernels, before the first tensor
_TOKEN_ID_BYTES = 4
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Need:
    """What a worker takes of its device's memory."""

    weights_bytes: int
    page_bytes: int
    """Of one page: K and V of all layers, token ids, features."""
    max_len: int
    """Longest row in tokens."""
    page_size: int = 16


@dataclass(frozen=True, slots=True)
class Budget:
    """The pages that workers on one device get.

    Attributes:
        pages: of each worker.
        needs: of the workers.
        memory: of the device when it was decided.
    """

    pages: int
    needs: tuple[Need, ...]
    memory: Memory

    def __str__(self) -> str:
        first = self.needs[0]
        tokens, taken = self.pages * first.page_size, self.pages * sum(need.page_bytes for need in self.needs)
        return (
            f"KV cache: {self.pages:,} pages = {tokens:,} tokens, {tokens / first.max_len:.1f} requests of "
            f"{first.max_len:,}; {size(taken)} of the {size(self.memory.free)} that are free"
        )


def model_need(
    config: ModelConfig,
    *,
    device: str,
    dtype: str,
    quantize: str,
    page_size: int = 16,
    max_len: int | None = None,
    feature_width: int = 0,
) -> Need:
    """Of a language model.

    Args:
        config: its sizes.
        device: cpu or cuda.
        dtype: as a worker is given it, auto included.
        quantize: none or int8.
        page_size: slots per page.
        max_len: longest row to serve; None for what it was made for.
        feature_width: values stored beside each slot.
    """
    return Need(
        weights_bytes=weights_bytes(expected_shapes(config), device=device, dtype=dtype, quantize=quantize),
        page_bytes=page_bytes(config, page_size, element_bytes(dtype, device), feature_width),
        max_len=config.limit_len(max_len),
        page_size=page_size,
    )


def page_bytes(config: ModelConfig, page_size: int, element: int, feature_width: int = 0) -> int:
    """Bytes of one page of a ``KVCache``, of elements of so many bytes."""
    kv = 2 * config.layers * config.kv_heads * config.head_dim
    return page_size * ((kv + feature_width) * element + _TOKEN_ID_BYTES)


def weights_bytes(shapes: Mapping[str, tuple[int, ...]], *, device: str, dtype: str, quantize: str) -> int:
    """Bytes of tensors once loaded, as near as can be said before."""
    element = 1 if quantize == "int8" else element_bytes(dtype, device)
    return sum(map(math.prod, shapes.values())) * element


def element_bytes(dtype: str, device: str) -> int:
    """Of a dtype as a worker is given it, auto included, on cpu or cuda."""
    return _ELEMENT_BYTES[("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype]


def decide(
    asked: Literal["auto"] | int,
    needs: Sequence[Need],
    memory: Memory,
    *,
    device: str,
    utilization: float = 0.9,
    to_start: int = 0,
    name: str = "pages",
) -> Budget:
    """The same number of pages for each of some workers on one device.

    Args:
        asked: so many, or auto: on a GPU all that fit into its share, on a CPU half of what is free, at most 4 GiB; and
            no more than 64 rows of the longest length can fill.
        needs: of each worker.
        memory: of the device.
        device: cpu or cuda.
        utilization: share of a GPU's memory that the workers may take, weights and all.
        to_start: processes among them that are still to start, and will take memory of their own.
        name: of the setting, in errors.

    Raises:
        InvalidArgumentError: ``asked`` pages do not fit, or not a single one does.
    """
    weights = sum(need.weights_bytes for need in needs) + to_start * _PROCESS_BYTES[device]
    per_page = sum(need.page_bytes for need in needs)
    most = memory.free * _CPU_SHARE if device == "cpu" else min(memory.free, memory.total * utilization)
    limit = max(int(most - weights), 0) // per_page
    beside = f"beside {size(weights)} of weights{' and processes' if to_start else ''}"
    share = "" if device == "cpu" else f", of which {utilization:.0%} may be used (--gpu-memory-utilization)"
    found = f"{beside}; {size(memory.free)} of {size(memory.total)} are free{share}"
    if limit < 1:
        raise InvalidArgumentError(f"{name} is {asked}, but not one page fits {found}: take a smaller model")
    if asked != "auto":
        if asked > limit:
            raise InvalidArgumentError(
                f"{name} is {asked:,}, which takes {size(asked * per_page)} {found}; at most {limit:,} pages fit"
            )
        return Budget(asked, tuple(needs), memory)
    if device == "cpu":
        sensible = min(int((memory.free - weights) * _CPU_AUTO_SHARE), CPU_AUTO_BYTES) // per_page
        limit = min(limit, max(sensible, 1))
    first = needs[0]
    return Budget(min(limit, MAX_ROWS * -(-first.max_len // first.page_size)), tuple(needs), memory)


def size(count: float) -> str:
    """Bytes for a person: 4.3 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
