"""How far a worker has come with loading its weights, told as it goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from pilotfish.runtime.kv_budget import size
from pilotfish.runtime.worker_config import WorkerConfig

Progress = Callable[[Literal["reading", "packing"], int, int], None]
"""Called with (what is done with the weights, bytes done, bytes in all)."""

_LINE_EVERY_S = 0.1
_LOG_EVERY_S = 5.0

log = logging.getLogger(__name__)


def silent(what: Literal["reading", "packing"], done: int, total: int) -> None:
    """Tells nothing."""


def telling(config: WorkerConfig) -> Progress:
    """As the worker is asked to tell: in lines for the process that started it, or now and then in its log."""
    return _Lines() if config.loading_lines else _Log()


class Packed(dict[str, Tensor]):
    """Weights that tell how many bytes of them were taken, as what packs them takes one after the other."""

    def __init__(self, weights: Mapping[str, Tensor], progress: Progress) -> None:
        super().__init__(weights)
        self._done, self._total, self._progress = 0, sum(tensor.nbytes for tensor in weights.values()), progress

    def pop(self, name: str, *default: Tensor | None) -> Tensor:  # type: ignore[override]
        tensor: Tensor = super().pop(name, *default)
        if tensor is not None:
            self._done += tensor.nbytes
            self._progress("packing", self._done, self._total)
        return tensor


class _Lines:
    def __init__(self) -> None:
        self._told_at = 0.0

    def __call__(self, what: Literal["reading", "packing"], done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= _LINE_EVERY_S or done >= total:
            self._told_at = now
            print(f"loading {what} {done} {total}", flush=True)


class _Log:
    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, what: Literal["reading", "packing"], done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= _LOG_EVERY_S:
            self._told_at = now
            log.info("%s weights: %s of %s", what, size(done), size(total))
