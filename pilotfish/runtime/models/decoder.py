"""What every decoder of the Llama family does, whatever runs it: Llama, Mistral, Qwen2, Qwen3, SmolLM.

Tokens of all rows are one flat axis; only attention and the cache know about rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.attention import Attention
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one forward leaves."""

    last: Tensor
    """Residual stream after the last layer, before the last norm, [tokens, hidden]."""
    features: Tensor | None
    """The states asked for, concatenated, [tokens, feature width]."""


class Decoder(ABC):
    """A decoder with its weights.

    Attributes:
        config: sizes; ``config.layers`` layers are used.
        dtype: of the cache and of features.
        device: where everything lies.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    @abstractmethod
    def create_attention(self, page_size: int) -> Attention:
        """The attention that ``forward`` is to be given."""

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache, attention: Any, features: Sequence[str] = ()) -> Hidden:
        """Runs a step's tokens, writing their K and V into the cache.

        Args:
            batch: the tokens and where they go.
            cache: pages of this model.
            attention: from ``create_attention``, planned for ``batch``.
            features: names as in types.proto, checked by ``feature_width``.
        """

    @abstractmethod
    def logits(self, last: Tensor) -> Tensor:
        """Logits f32[n, vocab] of rows of ``Hidden.last``."""

    def feature_width(self, features: Sequence[str]) -> int:
        """Values per token of the named states together.

        Raises:
            InvalidArgumentError: on an unknown or a repeated name.
        """
        known = {*(f"hidden.{i}" for i in range(self.config.layers + 1)), "final"}
        for name in features:
            if name not in known:
                limit = f"known are hidden.0 to hidden.{self.config.layers} and final"
                raise InvalidArgumentError(f"features names {name!r}; {limit}")
        if len(set(features)) < len(features):
            raise InvalidArgumentError(f"features is {list(features)}; each name may stand there once")
        return self.config.hidden_size * len(features)
