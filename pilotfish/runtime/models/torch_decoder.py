"""The decoder in plain torch, on any device; what the others are compared with.

Pre-norm transformer with RMS norm, rotary positions, grouped-query attention and a gated SiLU MLP
(Touvron et al., arXiv 2302.13971). The families differ by biases and by Qwen3's norm over the heads
of q and k, both read from the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime.attention import Attention, AttentionShape, create_attention
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.linear import Linear, make_linear
from pilotfish.runtime.models.decoder import Decoder, Hidden
from pilotfish.runtime.models.rope import Rope, rotate
from pilotfish.runtime.quantization import QuantizedLinear


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


class TorchDecoder(Decoder):
    """See the module.

    Args:
        config: sizes; ``config.layers`` layers are used.
        weights: from ``load_weights``, all of one dtype on one device. Emptied, so that no weight is held
            both as it was stored and as it multiplies; only tied embeddings are.
        quantized: round the linear layers to int8.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], *, quantized: bool = False) -> None:
        embeddings = weights.pop("model.embed_tokens.weight")
        super().__init__(config, embeddings.dtype, embeddings.device)
        head = embeddings if config.tied_embeddings else weights.pop("lm_head.weight")
        self._head = make_linear(head, None, quantized=quantized)
        is_rounded = config.tied_embeddings and quantized
        self._embeddings = None if is_rounded else embeddings
        self._norm = weights.pop("model.norm.weight")
        self._layers = [_layer(weights, f"model.layers.{i}", quantized) for i in range(config.layers)]
        self._rope = Rope(config.rope, config.head_dim, self.device)

    def create_attention(self, page_size: int) -> Attention:
        config = self.config
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, page_size)
        return create_attention("torch", shape, self.dtype, self.device)

    def forward(self, batch: Batch, cache: KVCache, attention: Attention, features: Sequence[str] = ()) -> Hidden:
        x = self._embed(batch.token_ids)
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
        return self._head(self._rms_norm(last, self._norm)).float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._embeddings is not None:
            return functional.embedding(token_ids, self._embeddings)
        assert isinstance(self._head, QuantizedLinear)
        return self._head.rows(token_ids).to(self.dtype)

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


def _layer(weights: dict[str, Tensor], prefix: str, quantized: bool) -> _Layer:
    def linear(*names: str) -> Linear:
        """Several layers of the same input as one."""
        weight = torch.cat([weights.pop(f"{prefix}.{name}.weight") for name in names])
        biases = [weights.pop(f"{prefix}.{name}.bias", None) for name in names]
        given = [bias for bias in biases if bias is not None]
        assert len(given) in (0, len(names)), "layers of one input have biases all or none"
        return make_linear(weight, torch.cat(given) if given else None, quantized=quantized)

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
