"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM.

Pre-norm transformer with RMS norm, rotary positions, grouped-query attention and a gated SiLU MLP
(Touvron et al., arXiv 2302.13971). The families differ by biases and by Qwen3's norm over the heads
of q and k, both read from the configuration. Tokens of all rows are one flat axis; only attention
and the cache know about rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.attention import Attention
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.models.rope import Rope, rotate


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    q: _Linear
    k: _Linear
    v: _Linear
    output: _Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate: _Linear
    up: _Linear
    down: _Linear


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one forward leaves."""

    last: Tensor
    """Residual stream after the last layer, before the last norm, [tokens, hidden]."""
    features: Tensor | None
    """The states asked for, concatenated, [tokens, feature width]."""


class Decoder:
    """A decoder with its weights.

    Args:
        config: sizes; ``config.layers`` layers are used.
        weights: from ``load_weights``, all of one dtype on one device.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._embeddings = weights["model.embed_tokens.weight"]
        self._head = self._embeddings if config.tied_embeddings else weights["lm_head.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, f"model.layers.{i}") for i in range(config.layers)]
        self.dtype, self.device = self._embeddings.dtype, self._embeddings.device
        self._rope = Rope(config.rope, config.head_dim, self.device)

    def forward(self, batch: Batch, cache: KVCache, attention: Attention, features: Sequence[str] = ()) -> Hidden:
        """Runs a step's tokens, writing their K and V into the cache.

        Args:
            batch: the tokens and where they go.
            cache: pages of this model.
            attention: already planned for ``batch``.
            features: names as in types.proto, checked by ``feature_width``.
        """
        x = functional.embedding(batch.token_ids, self._embeddings)
        cos, sin = self._rope.tables(batch.positions, self.dtype)
        wanted = set(features)
        captured = {"hidden.0": x}
        for index, layer in enumerate(self._layers):
            h = self._rms_norm(x, layer.attention_norm)
            x = x + self._attend(layer, index, h, cos, sin, batch, cache, attention)
            h = self._rms_norm(x, layer.mlp_norm)
            x = x + layer.down(functional.silu(layer.gate(h)) * layer.up(h))
            if (name := f"hidden.{index + 1}") in wanted:
                captured[name] = x
        if "final" in wanted:
            captured["final"] = self._rms_norm(x, self._norm)
        return Hidden(x, torch.cat([captured[name] for name in features], dim=-1) if features else None)

    def logits(self, last: Tensor) -> Tensor:
        """Logits f32[n, vocab] of rows of ``Hidden.last``."""
        return functional.linear(self._rms_norm(last, self._norm), self._head).float()

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

    def _attend(
        self,
        layer: _Layer,
        index: int,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        cache: KVCache,
        attention: Attention,
    ) -> Tensor:
        heads = (len(h), -1, self.config.head_dim)
        q, k, v = layer.q(h).view(heads), layer.k(h).view(heads), layer.v(h).view(heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
        cache.write(index, batch.slots, rotate(k, cos, sin), v)
        out = attention.run(rotate(q, cos, sin), cache.layers[index])
        return layer.output(out.reshape(len(h), -1))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In float32 whatever the dtype, rounded before the weight, as the reference models do."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_eps)
        return (wide * scale).to(x.dtype) * weight


def _layer(weights: Mapping[str, Tensor], prefix: str) -> _Layer:
    def linear(name: str) -> _Linear:
        return _Linear(weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))

    return _Layer(
        attention_norm=weights[f"{prefix}.input_layernorm.weight"],
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        q_norm=weights.get(f"{prefix}.self_attn.q_norm.weight"),
        k_norm=weights.get(f"{prefix}.self_attn.k_norm.weight"),
        mlp_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
