"""Layers and heads on fused CPU kernels, a call for several layers; see ``native/kernels``.

Activations are float32 whatever the dtype of weights and cache. A token's numbers do not depend on what else is in the
batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime import cores
from pilotfish.runtime.attention import AttentionShape
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.models.layers import (
    Embedding,
    Kernels,
    Layers,
    LayerWeights,
    LinearWeights,
    OutputHead,
    Projection,
)
from pilotfish.runtime.models.rope import Rope
from pilotfish.runtime.native.attention import HEAD_DIMS, NativeAttention
from pilotfish.runtime.native.library import FLOAT_KINDS, Layer, Part, Shape, is_available, library
from pilotfish.runtime.native.linear import Arena, NativeLinear, interleave, packed_size

_AT_ONCE = 6  # layers in a call; between calls the share of the cores is looked up
_MULTIPLE = 32  # of every width: so many outputs make a panel, and inputs an int8 group


def why_not_native(widths: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model of these widths, inputs of its linear layers, cannot run on the kernels; None if it can."""
    if device.type != "cpu" or dtype not in FLOAT_KINDS:
        return f"they run float32 and bfloat16 on the CPU, not {dtype} on {device}"
    if head_dim not in HEAD_DIMS or any(width % _MULTIPLE for width in widths):
        return f"head size {head_dim} or one of the widths {widths} does not suit them"
    return None if is_available() else "they cannot be compiled here"


class NativeKernels(Kernels):
    """See the module."""

    activations = torch.float32

    def layers(self, config: ModelConfig, weights: dict[str, Tensor], prefixes: Sequence[str]) -> Layers:
        return NativeLayers(self, config, weights, prefixes)

    def output_heads(self, matrix: Tensor, norms: Sequence[Tensor | None], eps: float) -> list[OutputHead]:
        linear = self._linear(matrix, None)
        return [_OutputHead(linear, norm, eps) for norm in norms]

    def embedding(self, matrix: Tensor) -> Embedding:
        return lambda token_ids: functional.embedding(token_ids, matrix).float()

    def tied(self, matrix: Tensor, norm: Tensor | None, eps: float) -> tuple[Embedding, OutputHead]:
        head = _OutputHead(self._linear(matrix, None), norm, eps)
        return head.embed, head

    def projection(
        self, weight: Tensor, bias: Tensor | None = None, norms: Sequence[Tensor | None] = (None,), eps: float = 0.0
    ) -> Projection:
        return _Projection(self._linear(weight, bias), norms, eps)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        return NativeLinear(weight, bias, Arena(packed_size(weight, self.quantized)), quantized=self.quantized)


class NativeLayers(Layers):
    """See the module."""

    def __init__(
        self, kernels: NativeKernels, config: ModelConfig, weights: dict[str, Tensor], prefixes: Sequence[str]
    ) -> None:
        super().__init__(config)
        self._dtype = kernels.dtype
        own = tuple(f"{prefix}." for prefix in prefixes)
        matrices = [weight for name, weight in weights.items() if name.startswith(own) and name.endswith("proj.weight")]
        arena = Arena(sum(packed_size(matrix, kernels.quantized) for matrix in matrices))
        del matrices
        self._layers = [
            _Layer(LayerWeights.take(weights, prefix, config.hidden_size), arena, kernels.quantized)
            for prefix in prefixes
        ]
        self._structs = (Layer * len(prefixes))(*(layer.struct for layer in self._layers))
        self._rope = Rope(config.rope, config.head_dim, kernels.device)
        self._tables = (torch.empty(0), torch.empty(0))  # of the rope, made longer when a position asks for it

    def create_attention(self, page_size: int) -> NativeAttention:
        config = self.config
        return NativeAttention(AttentionShape(config.heads, config.kv_heads, config.head_dim, page_size), self._dtype)

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        cache: KVCache,
        attention: NativeAttention,
        beside: Tensor | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> Tensor:
        x = x.float().contiguous()
        beside = x if beside is None else beside.float().contiguous()
        cosines, sines = self._angles(int(batch.positions.max()))
        step = attention.step
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.positions, step.slots = batch.positions.data_ptr(), batch.slots.slots.data_ptr()
        shape = self._shape(cache)
        kv_bytes = cache.layers[0].numel() * cache.layers[0].element_size()
        end = self.config.layers if end is None else end
        for begin in range(first, end, _AT_ONCE):
            step.threads = cores.threads()  # anew each time: others may begin to compute at any moment
            count, layers, kv = min(_AT_ONCE, end - begin), self._structs[begin], cache.layers[begin].data_ptr()
            arguments = (shape, ctypes.pointer(layers), count, step, x.data_ptr(), beside.data_ptr(), kv, kv_bytes)
            library().pilotfish_layers(*arguments)
        return x

    def _angles(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions up to this one and some beyond."""
        if position >= len(self._tables[0]):
            positions = torch.arange(1 << max(position.bit_length(), 10))
            self._tables = self._rope.tables(positions, torch.float32)
        return self._tables

    def _shape(self, cache: KVCache) -> ctypes.Structure:
        config = self.config
        return Shape(
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_size=cache.page_size,
            cache_kind=FLOAT_KINDS[self._dtype],
            eps=config.rms_eps,
        )


class _Layer:
    """One layer's weights, and the struct that points to them; good as long as this object lives."""

    def __init__(self, given: LayerWeights, arena: Arena, quantized: bool) -> None:
        def linear(part: LinearWeights) -> NativeLinear:
            return NativeLinear(part.weight, part.bias, arena, quantized=quantized)

        def gated(gate: LinearWeights, up: LinearWeights) -> NativeLinear:
            biases = [part.bias for part in (gate, up) if part.bias is not None]
            bias = interleave(*biases) if biases else None
            return NativeLinear(interleave(gate.weight, up.weight), bias, arena, quantized=quantized)

        norms = (given.beside_norm, given.attention_norm, given.q_norm, given.k_norm, given.mlp_norm)
        self._norms = [_wide(norm) for norm in norms]
        self._qkv, self._output = linear(given.qkv), linear(given.output)
        self._gate_up, self._down = gated(given.gate, given.up), linear(given.down)
        beside_norm, attention_norm, q_norm, k_norm, mlp_norm = map(_pointer, self._norms)
        self.struct = Layer(
            has_beside=given.has_beside,
            beside_norm=beside_norm,
            attention_norm=attention_norm,
            qkv=self._qkv.struct,
            output=self._output.struct,
            q_norm=q_norm,
            k_norm=k_norm,
            mlp_norm=mlp_norm,
            gate_up=self._gate_up.struct,
            down=self._down.struct,
        )


class _OutputHead(OutputHead):
    def __init__(self, linear: NativeLinear, norm: Tensor | None, eps: float) -> None:
        super().__init__(_wide(norm), eps)
        self.rows = linear.outputs
        self._linear = _Projection(linear, (norm,), eps)

    def logits(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the matrix, f32[n, hidden]."""
        linear = self._linear.linear.struct
        x = torch.empty(len(token_ids), linear.inputs)
        library().pilotfish_embed(ctypes.byref(linear), token_ids.data_ptr(), len(token_ids), x.data_ptr())
        return x


class _Projection(Projection):
    def __init__(self, linear: NativeLinear, norms: Sequence[Tensor | None], eps: float) -> None:
        self.linear = linear
        self._norms, self._eps = [_wide(norm) for norm in norms], eps
        self._parts = Part * len(norms)

    def __call__(self, *parts: Tensor) -> Tensor:
        wide = [part.float() for part in parts]
        rows, width = len(wide[0]), self.linear.outputs
        structs = self._parts(
            *(
                Part(part.data_ptr(), part.stride(0), part.shape[1], _pointer(norm))
                for part, norm in zip(wide, self._norms, strict=True)
            )
        )
        y = torch.empty(rows, width)
        linear, threads = ctypes.byref(self.linear.struct), cores.threads()
        library().pilotfish_linear(linear, structs, len(wide), self._eps, rows, width, threads, y.data_ptr())
        return y


def _wide(norm: Tensor | None) -> Tensor | None:
    return None if norm is None else norm.float()


def _pointer(norm: Tensor | None) -> int | None:
    return None if norm is None else norm.data_ptr()
