"""A decoder of the Llama family, whatever runs it: Llama, Mistral, Qwen2, Qwen3, SmolLM."""

from __future__ import annotations

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
from pilotfish.runtime.models.layers import Kernels


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one forward leaves."""

    last: Tensor
    """Residual stream after the last layer, before the last norm, [tokens, hidden]."""
    features: Tensor | None
    """The states asked for, concatenated, [tokens, feature width]."""


class Decoder:
    """Embeddings, layers and output head.

    Args:
        config: sizes; ``config.layers`` layers are used.
        weights: from ``load_weights``, all of one dtype on one device. Emptied; see ``Kernels.layers``.
        kernels: for that dtype and device.

    Attributes:
        config: sizes.
        dtype: of the cache and of features.
        device: where everything lies.
        layers: the layers.
        head: the output head.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels) -> None:
        self.config, self.dtype, self.device = config, kernels.dtype, kernels.device
        embeddings, norm = weights.pop("model.embed_tokens.weight"), weights.pop("model.norm.weight")
        if config.tied_embeddings:
            self._embed, self.head = kernels.tied(embeddings, norm, config.rms_eps)
        else:
            self._embed = kernels.embedding(embeddings)
            (self.head,) = kernels.output_heads(weights.pop("lm_head.weight"), [norm], config.rms_eps)
        del embeddings
        self.layers = kernels.layers(config, weights, [f"model.layers.{i}" for i in range(config.layers)])

    def create_attention(self, page_size: int) -> Attention:
        """The attention that ``forward`` is to be given."""
        return self.layers.create_attention(page_size)

    def forward(self, batch: Batch, cache: KVCache, attention: Any, features: Sequence[str] = ()) -> Hidden:
        """Runs a step's tokens, writing their K and V into the cache.

        Args:
            batch: the tokens and where they go.
            cache: pages of this model.
            attention: from ``create_attention``, planned for ``batch``.
            features: names as in types.proto, checked by ``feature_width``.
        """
        x = self._embed(batch.token_ids)
        captured: dict[str, Tensor] = {}
        first = 0
        for end in self._stops(features):
            x = self.layers.forward(x, batch, cache, attention, first=first, end=end)
            if (name := f"hidden.{end}") in features:
                captured[name] = x.to(self.dtype, copy=True)
            first = end
        if "final" in features:
            captured["final"] = self.head.normed(x).to(self.dtype)
        return Hidden(x, torch.cat([captured[name] for name in features], dim=-1) if features else None)

    def logits(self, last: Tensor) -> Tensor:
        """Logits f32[n, vocab] of rows of ``Hidden.last``."""
        return self.head.logits(last)

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

    def _stops(self, features: Sequence[str]) -> list[int]:
        """Layers behind which a state is kept, and the last."""
        wanted = {int(name.removeprefix("hidden.")) for name in features if name.startswith("hidden.")}
        return sorted({self.config.layers, *wanted})
