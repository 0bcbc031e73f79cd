"""The decoder on fused CPU kernels, a call for several layers; see ``native/kernels``."""

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
from pilotfish.runtime.models.decoder import Decoder, Hidden
from pilotfish.runtime.models.rope import Rope
from pilotfish.runtime.native.attention import HEAD_DIMS, NativeAttention
from pilotfish.runtime.native.library import FLOAT_KINDS, Layer, Shape, is_available, library
from pilotfish.runtime.native.linear import Arena, NativeLinear, interleave, packed_size

_AT_ONCE = 6  # layers in a call; between calls the share of the cores is looked up
_MULTIPLE = 32  # of every width: so many outputs make a panel, and inputs an int8 group


def why_not_native(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this model cannot run on the kernels; None if it can."""
    if device.type != "cpu" or dtype not in FLOAT_KINDS:
        return f"they run float32 and bfloat16 on the CPU, not {dtype} on {device}"
    widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
    if config.head_dim not in HEAD_DIMS or any(width % _MULTIPLE for width in widths):
        return f"head size {config.head_dim} or one of the widths {widths} does not suit them"
    return None if is_available() else "they cannot be compiled here"


class NativeDecoder(Decoder):
    """As ``TorchDecoder``, with float32 activations whatever the dtype of weights and cache.

    A token's numbers do not depend on what else is in the batch.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], *, quantized: bool = False) -> None:
        embeddings = weights.pop("model.embed_tokens.weight")
        super().__init__(config, embeddings.dtype, embeddings.device)
        head = embeddings if config.tied_embeddings else weights.pop("lm_head.weight")
        matrices = [head, *(weight for name, weight in weights.items() if name.endswith("proj.weight"))]
        arena = Arena(sum(packed_size(matrix, quantized) for matrix in matrices))
        self._head = NativeLinear(head, None, arena, quantized=quantized)
        self._embeddings = None if config.tied_embeddings else embeddings
        self._norm = weights.pop("model.norm.weight").float()
        self._layers = [_Layer(weights, f"model.layers.{i}", arena, quantized) for i in range(config.layers)]
        self._structs = (Layer * config.layers)(*(layer.struct for layer in self._layers))
        self._rope = Rope(config.rope, config.head_dim, self.device)
        self._tables = (torch.empty(0), torch.empty(0))  # of the rope, made longer when a position asks for it

    def create_attention(self, page_size: int) -> NativeAttention:
        config = self.config
        return NativeAttention(AttentionShape(config.heads, config.kv_heads, config.head_dim, page_size), self.dtype)

    def forward(self, batch: Batch, cache: KVCache, attention: NativeAttention, features: Sequence[str] = ()) -> Hidden:
        x = self._embed(batch.token_ids)
        cosines, sines = self._angles(int(batch.positions.max()))
        step = attention.step
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.positions, step.slots = batch.positions.data_ptr(), batch.slots.slots.data_ptr()
        shape = self._shape(cache)
        kv_bytes = cache.layers[0].numel() * cache.layers[0].element_size()
        captured = {"hidden.0": x.to(self.dtype, copy=True)} if "hidden.0" in features else {}
        begin = 0
        for end in self._stops(features):
            step.threads = cores.threads()  # anew each time: others may begin to compute at any moment
            layers, kv = ctypes.pointer(self._structs[begin]), cache.layers[begin].data_ptr()
            library().pilotfish_layers(shape, layers, end - begin, step, x.data_ptr(), kv, kv_bytes)
            if (name := f"hidden.{end}") in features:
                captured[name] = x.to(self.dtype, copy=True)
            begin = end
        if "final" in features:
            captured["final"] = functional.rms_norm(x, self._norm.shape, self._norm, self.config.rms_eps).to(self.dtype)
        return Hidden(x, torch.cat([captured[name] for name in features], dim=-1) if features else None)

    def _angles(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions up to this one and some beyond."""
        if position >= len(self._tables[0]):
            positions = torch.arange(1 << max(position.bit_length(), 10))
            self._tables = self._rope.tables(positions, torch.float32)
        return self._tables

    def _stops(self, features: Sequence[str]) -> list[int]:
        """Layers after which the kernels return."""
        wanted = {int(name.removeprefix("hidden.")) for name in features if name.startswith("hidden.")}
        return sorted({*range(_AT_ONCE, self.config.layers, _AT_ONCE), self.config.layers, *wanted} - {0})

    def logits(self, last: Tensor) -> Tensor:
        rows, width = len(last), self._head.outputs
        logits = torch.empty(rows, width)
        library().pilotfish_linear(
            ctypes.byref(self._head.struct),
            self._norm.data_ptr(),
            self.config.rms_eps,
            last.data_ptr(),
            rows,
            width,
            cores.threads(),
            logits.data_ptr(),
        )
        return logits

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._embeddings is not None:
            return functional.embedding(token_ids, self._embeddings).float()
        x = torch.empty(len(token_ids), self.config.hidden_size)
        head = ctypes.byref(self._head.struct)
        library().pilotfish_embed(head, token_ids.data_ptr(), len(token_ids), x.data_ptr())
        return x

    def _shape(self, cache: KVCache) -> ctypes.Structure:
        config = self.config
        return Shape(
            hidden=config.hidden_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_size=cache.page_size,
            cache_kind=FLOAT_KINDS[self.dtype],
            eps=config.rms_eps,
        )


class _Layer:
    """One layer's weights, and the struct that points to them; good as long as this object lives."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, arena: Arena, quantized: bool) -> None:
        def parts(*names: str) -> tuple[list[Tensor], list[Tensor]]:
            biases = [weights.pop(f"{prefix}.{name}.bias", None) for name in names]
            matrices = [weights.pop(f"{prefix}.{name}.weight") for name in names]
            return matrices, [bias for bias in biases if bias is not None]

        def linear(*names: str) -> NativeLinear:
            matrices, biases = parts(*names)
            return NativeLinear(torch.cat(matrices), torch.cat(biases) if biases else None, arena, quantized=quantized)

        def gated(*names: str) -> NativeLinear:
            matrices, biases = parts(*names)
            bias = interleave(*biases) if biases else None
            return NativeLinear(interleave(*matrices), bias, arena, quantized=quantized)

        def norm(name: str) -> Tensor | None:
            weight = weights.pop(f"{prefix}.{name}.weight", None)
            return None if weight is None else weight.float()

        self._norms = [norm(f"{name}_layernorm") for name in ("input", "post_attention")]
        self._head_norms = [norm(f"self_attn.{name}_norm") for name in "qk"]
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output, self._gate_up = linear("self_attn.o_proj"), gated("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")
        norms = [None if norm is None else norm.data_ptr() for norm in (*self._norms, *self._head_norms)]
        self.struct = Layer(
            attention_norm=norms[0],
            qkv=self._qkv.struct,
            output=self._output.struct,
            q_norm=norms[2],
            k_norm=norms[3],
            mlp_norm=norms[1],
            gate_up=self._gate_up.struct,
            down=self._down.struct,
        )
