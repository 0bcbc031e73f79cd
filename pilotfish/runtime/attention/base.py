"""What every attention backend does: plan once per step, run once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from pilotfish.runtime.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that never change within a model."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


class Attention(ABC):
    """Attention of ragged query rows over paged keys and values that are already written.

    A query of a chain sees its own slot and all before it in its row; one of a tree what ``Batch.trees`` says.
    """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepares the next step from the host integers of ``batch``."""

    @abstractmethod
    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        """Attends in one layer.

        Args:
            q: rotated queries, ``[tokens, heads, head_dim]``.
            kv: one layer of the cache, ``[pages, 2, page_size, kv_heads, head_dim]``.

        Returns:
            ``[tokens, heads, head_dim]``.
        """
