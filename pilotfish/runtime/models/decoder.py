"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM.

Pre-norm transformer with RMS norm, rotary positions, grouped-query attention and a gated SiLU MLP
(Touvron et al., arXiv 2302.13971). The families differ by biases and by Qwen3's norm over the heads
of q and k, both read from the configuration. Tokens of all rows are one flat axis; only attention
and the cache know about rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.attention import Attention
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.linear import Linear, make_linear
from pilotfish.runtime.models.rope import Rope, rotate


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Linear  # to the heads of q, then k, then v
    output: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # to gate, then up
    down: Linear


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
        weights: from ``load_weights``, all of one dtype on one device. Emptied, so that no weight is held
            both as it was stored and as it multiplies; only tied embeddings are.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self._embeddings = weights.pop("model.embed_tokens.weight")
        self._head = make_linear(self._embeddings if config.tied_embeddings else weights.pop("lm_head.weight"), None)
        self._norm = weights.pop("model.norm.weight")
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
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
            if (name := f"hidden.{index + 1}") in wanted:
                captured[name] = x
        if "final" in wanted:
            captured["final"] = self._rms_norm(x, self._norm)
        return Hidden(x, torch.cat([captured[name] for name in features], dim=-1) if features else None)

    def logits(self, last: Tensor) -> Tensor:
        """Logits f32[n, vocab] of rows of ``Hidden.last``."""
        return self._head(self._rms_norm(last, self._norm)).float()

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
        heads = (self.config.heads, self.config.kv_heads, self.config.kv_heads)
        q, k, v = layer.qkv(h).view(len(h), -1, self.config.head_dim).split(heads, dim=1)
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


def _layer(weights: dict[str, Tensor], prefix: str) -> _Layer:
    def linear(*names: str) -> Linear:
        """Several layers of the same input as one."""
        weight = torch.cat([weights.pop(f"{prefix}.{name}.weight") for name in names])
        biases = [weights.pop(f"{prefix}.{name}.bias", None) for name in names]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(names)), "layers of one input have biases all or none"
        return make_linear(weight, torch.cat(given) if given else None)

    return _Layer(
        attention_norm=weights.pop(f"{prefix}.input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        q_norm=weights.pop(f"{prefix}.self_attn.q_norm.weight", None),
        k_norm=weights.pop(f"{prefix}.self_attn.k_norm.weight", None),
        mlp_norm=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
