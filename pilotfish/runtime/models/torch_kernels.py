"""Layers and heads in plain torch, on any device; what the others are compared with.

The families differ by biases and by Qwen3's norm over the heads of q and k, both read from the weights.
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
from pilotfish.runtime.models.layers import (
    Embedding,
    Kernels,
    Layers,
    LayerWeights,
    LinearWeights,
    OutputHead,
    Projection,
    rms_norm,
)
from pilotfish.runtime.models.rope import Rope, rotate
from pilotfish.runtime.quantization import QuantizedLinear


class TorchKernels(Kernels):
    """See the module. Activations have the dtype of the weights."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, quantized: bool = False) -> None:
        super().__init__(dtype, device, quantized=quantized)
        self.activations = dtype

    def layers(self, config: ModelConfig, weights: dict[str, Tensor], prefixes: Sequence[str]) -> Layers:
        return TorchLayers(self, config, weights, prefixes)

    def output_heads(self, matrix: Tensor, norms: Sequence[Tensor | None], eps: float) -> list[OutputHead]:
        linear = self.linear(matrix)
        return [_OutputHead(linear, len(matrix), norm, eps) for norm in norms]

    def embedding(self, matrix: Tensor) -> Embedding:
        return lambda token_ids: functional.embedding(token_ids, matrix)

    def tied(self, matrix: Tensor, norm: Tensor | None, eps: float) -> tuple[Embedding, OutputHead]:
        if not self.quantized:
            return self.embedding(matrix), self.output_heads(matrix, [norm], eps)[0]
        rounded = QuantizedLinear(matrix, None)
        head = _OutputHead(rounded, len(matrix), norm, eps)
        return lambda token_ids: rounded.rows(token_ids).to(self.dtype), head

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, norms: Sequence[Tensor | None] = (None,), eps: float = 0.0
    ) -> Projection:
        return _Projection(self.linear(weight, bias), norms, eps, self.dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return make_linear(weight, bias, quantized=self.quantized)


class TorchLayers(Layers):
    """See the module."""

    def __init__(
        self, kernels: TorchKernels, config: ModelConfig, weights: dict[str, Tensor], prefixes: Sequence[str]
    ) -> None:
        super().__init__(config)
        self._dtype, self._device = kernels.dtype, kernels.device
        self._layers = [_layer(kernels, LayerWeights.take(weights, name, config.hidden_size)) for name in prefixes]
        self._rope = Rope(config.rope, config.head_dim, self._device)

    def create_attention(self, page_size: int) -> Attention:
        config = self.config
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, page_size)
        return create_attention("torch", shape, self._dtype, self._device)

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        cache: KVCache,
        attention: Attention,
        beside: Tensor | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> Tensor:
        x = x.to(self._dtype)
        cos, sin = self._rope.tables(batch.positions, self._dtype)
        for index, layer in list(enumerate(self._layers))[first:end]:
            h = self._norm(x, layer.attention_norm)
            if layer.has_beside:
                assert beside is not None
                h = torch.cat((self._norm(beside.to(self._dtype), layer.beside_norm), h), dim=-1)
            x = x + self._attend(layer, index, h, cos, sin, batch, cache, attention)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        return x

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
        q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        cache.write(index, batch.slots, rotate(k, cos, sin), v)
        out = attention.run(rotate(q, cos, sin), cache.layers[index])
        return layer.output(out.reshape(len(h), -1))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """As ``LayerWeights``, ready to multiply."""

    has_beside: bool
    beside_norm: Tensor | None
    attention_norm: Tensor | None
    qkv: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear  # to gate, then up
    down: Linear


def _layer(kernels: TorchKernels, given: LayerWeights) -> _Layer:
    def linear(part: LinearWeights) -> Linear:
        return kernels.linear(part.weight, part.bias)

    biases = [part.bias for part in (given.gate, given.up) if part.bias is not None]
    return _Layer(
        has_beside=given.has_beside,
        beside_norm=given.beside_norm,
        attention_norm=given.attention_norm,
        qkv=linear(given.qkv),
        output=linear(given.output),
        q_norm=given.q_norm,
        k_norm=given.k_norm,
        mlp_norm=given.mlp_norm,
        gate_up=kernels.linear(torch.cat((given.gate.weight, given.up.weight)), torch.cat(biases) if biases else None),
        down=linear(given.down),
    )


class _OutputHead(OutputHead):
    def __init__(self, linear: Linear, rows: int, norm: Tensor | None, eps: float) -> None:
        super().__init__(norm, eps)
        self.rows = rows
        self._linear = linear

    def logits(self, x: Tensor) -> Tensor:
        return self._linear(self.normed(x)).float()


class _Projection(Projection):
    def __init__(self, linear: Linear, norms: Sequence[Tensor | None], eps: float, dtype: torch.dtype) -> None:
        self._linear, self._norms, self._eps, self._dtype = linear, norms, eps, dtype

    def __call__(self, *parts: Tensor) -> Tensor:
        narrow = [part.to(self._dtype) for part in parts]
        normed = [
            part if norm is None else rms_norm(part, norm, self._eps)
            for part, norm in zip(narrow, self._norms, strict=True)
        ]
        return self._linear(torch.cat(normed, dim=-1))
