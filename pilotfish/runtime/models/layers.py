"""The parts that decoders and draft heads are built from, whatever runs them.

Tokens of all rows are one flat axis; only attention and the cache know about rows. ``Kernels`` makes the parts: in
plain torch on any device (``torch_kernels``), or on fused CPU kernels (``native_kernels``). Parts of one model come
from the same ``Kernels``; ``choose_kernels`` picks them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotfish.runtime.attention import Attention
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache

Embedding = Callable[[Tensor], Tensor]
"""Token ids i64[n] to their vectors [n, hidden], in the kernels' ``activations``."""


class Layers(ABC):
    """A run of decoder layers: pre-norm, rotary positions, grouped-query attention, gated SiLU (arXiv 2302.13971).

    Attributes:
        config: sizes; ``config.layers`` of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def create_attention(self, page_size: int) -> Attention:
        """The attention that ``forward`` is to be given."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        batch: Batch,
        cache: KVCache,
        attention: Any,
        beside: Tensor | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Runs a step's tokens, writing their K and V into the cache.

        Args:
            x: residual stream [tokens, hidden], of any floating type. May be overwritten.
            batch: where the tokens go and what they see; their ids do not matter here.
            cache: pages of these layers.
            attention: from ``create_attention``, planned for ``batch``.
            beside: [tokens, hidden], for a first layer that attends over more than x; see ``LayerWeights``.
            first: index of the first layer to run.
            end: index behind the last; None for all.

        Returns:
            The residual stream behind the last of them, [tokens, hidden], in the kernels' ``activations``.
        """


class OutputHead(ABC):
    """From the residual stream to logits, behind a norm if there is one.

    Attributes:
        rows: logits of a token.
    """

    rows: int

    def __init__(self, norm: Tensor | None, eps: float) -> None:
        self._norm, self._eps = norm, eps

    def normed(self, x: Tensor) -> Tensor:
        """``x`` [n, hidden] behind the norm, as ``logits`` sees it; x itself if there is none."""
        return x if self._norm is None else rms_norm(x, self._norm, self._eps)

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Logits f32[n, rows] of the residual stream [n, hidden]."""


class Projection(ABC):
    """One linear layer over several inputs side by side, each behind a norm of its own if it has one."""

    @abstractmethod
    def __call__(self, *parts: Tensor) -> Tensor:
        """[norm(part) ; ...] @ weight.T + bias.

        Args:
            *parts: as many as there are norms, [n, width] each, of any floating type.

        Returns:
            [n, out] in the kernels' ``activations``.
        """


class Kernels(ABC):
    """Makes the parts of models.

    Attributes:
        dtype: of weights and cache.
        device: where everything lies.
        activations: of what passes between parts.
        quantized: whether linear layers are rounded to int8.
    """

    activations: torch.dtype

    def __init__(self, dtype: torch.dtype, device: torch.device, *, quantized: bool = False) -> None:
        self.dtype, self.device, self.quantized = dtype, device, quantized

    @abstractmethod
    def layers(self, config: ModelConfig, weights: dict[str, Tensor], prefixes: Sequence[str]) -> Layers:
        """Decoder layers.

        Args:
            config: sizes.
            weights: what ``LayerWeights.take`` wants. Taken out, so that no weight is held both as it was stored and as
                it multiplies.
            prefixes: of the names of each layer, such as ``model.layers.0``; ``config.layers`` of them.
        """

    @abstractmethod
    def output_heads(self, matrix: Tensor, norms: Sequence[Tensor | None], eps: float) -> list[OutputHead]:
        """Logits from one matrix [rows, hidden], held once, behind each of the norms [hidden]; None: behind none."""

    @abstractmethod
    def embedding(self, matrix: Tensor) -> Embedding:
        """Vectors of tokens, rows of a matrix [vocab, hidden]."""

    @abstractmethod
    def tied(self, matrix: Tensor, norm: Tensor | None, eps: float) -> tuple[Embedding, OutputHead]:
        """Both of one matrix, held once where that can be."""

    @abstractmethod
    def projection(
        self, weight: Tensor, bias: Tensor | None = None, norms: Sequence[Tensor | None] = (None,), eps: float = 0.0
    ) -> Projection:
        """A linear layer over as many inputs as there are norms.

        Args:
            weight: [out, sum of the inputs' widths].
            bias: [out], or None.
            norms: of each input, [width]; None leaves an input as it is.
            eps: of the norms.
        """


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """One linear layer, perhaps put together from several of the same input."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The tensors of one layer, by Hugging Face's names; norms and biases are those that are there.

    EAGLE-1's first layer has no norm before its attention (arXiv 2401.15077, reference code). EAGLE-3's attends over
    [norm(beside) ; norm(x)] (arXiv 2503.01840, section 3.1): its q, k and v have twice the columns, ``input_layernorm``
    belongs to ``beside`` and ``hidden_norm`` to x. The residual is x in any case.
    """

    beside_norm: Tensor | None
    attention_norm: Tensor | None  # [hidden]
    qkv: LinearWeights  # to the heads of q, then k, then v
    output: LinearWeights
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    mlp_norm: Tensor | None  # [hidden]
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights

    @property
    def has_beside(self) -> bool:
        """Whether the attention reads ``beside`` too."""
        return self.qkv.weight.shape[1] == 2 * self.gate.weight.shape[1]

    @classmethod
    def take(cls, weights: dict[str, Tensor], prefix: str, hidden: int) -> LayerWeights:
        """Takes a layer's tensors out of ``weights``."""

        def linear(*names: str) -> LinearWeights:
            matrices = [weights.pop(f"{prefix}.{name}.weight") for name in names]
            biases = [weights.pop(f"{prefix}.{name}.bias", None) for name in names]
            given = [bias for bias in biases if bias is not None]
            assert len(given) in (0, len(names)), "layers of one input have biases all or none"
            return LinearWeights(_joined(matrices), _joined(given) if given else None)

        def norm(name: str) -> Tensor | None:
            return weights.pop(f"{prefix}.{name}.weight", None)

        qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        has_beside = qkv.weight.shape[1] == 2 * hidden
        input_norm = norm("input_layernorm")
        return cls(
            beside_norm=input_norm if has_beside else None,
            attention_norm=norm("hidden_norm") if has_beside else input_norm,
            qkv=qkv,
            output=linear("self_attn.o_proj"),
            q_norm=norm("self_attn.q_norm"),
            k_norm=norm("self_attn.k_norm"),
            mlp_norm=norm("post_attention_layernorm"),
            gate=linear("mlp.gate_proj"),
            up=linear("mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., hidden] scaled to a root mean square of 1, times the weight (Zhang & Sennrich, arXiv 1910.07467).

    In float32 whatever the dtype, rounded before the weight, as the reference models do.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
