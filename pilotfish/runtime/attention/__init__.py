"""Attention backends by name; the heavy imports happen when one is made."""

from __future__ import annotations

import torch

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.attention.base import Attention, AttentionShape

__all__ = ["BACKENDS", "Attention", "AttentionShape", "create_attention"]

BACKENDS = ("torch",)


def create_attention(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Attention:
    """Makes a backend.

    Args:
        name: one of ``BACKENDS``. ``torch`` runs anywhere and is the oracle for the others.
        shape: heads and pages.
        dtype: of queries, keys and values.
        device: where they lie.

    Raises:
        InvalidArgumentError: on another name.
    """
    if name == "torch":
        from pilotfish.runtime.attention.torch_backend import TorchAttention

        return TorchAttention(shape, dtype, device)
    raise InvalidArgumentError(f"attention backend is {name!r}; known are {', '.join(BACKENDS)}")
