"""Heads and draft models as they are trained: what enters a slot, what comes out, and what the next draft step gets.

Slot i of a head holds (h_i, t_{i+1}) and predicts t_{i+2}; slot i of a draft model holds t_i and predicts t_{i+1}. One
number tells them apart: the ``lead``, 1 or 0. The k-th step of slot i takes token i + lead + k at position i + k, and
is to say what the target says at token i + lead + k. The serving twins are in ``draft_svc.drafters``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_svc.drafters.eagle3 import default_layers
from draft_svc.training.modules import DecoderLayer, Positions, RMSNorm
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig

Weights = Mapping[str, Tensor]


class Head(nn.Module, ABC):
    """What is trained.

    Attributes:
        config: sizes of the target.
        features: states of the target that it reads, by the names of types.proto.
        lead: see the module.
        returns_states: whether its output means a guess of the target's post-norm state.
    """

    features: tuple[str, ...]
    lead: int
    returns_states: bool

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def depth(self) -> int | None:
        """Draft tokens that it can say behind a slot; None for any number."""
        return None

    @abstractmethod
    def initialise(self, weights: Weights) -> None:
        """Begins from the target's tensors, by their Hugging Face names."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by the names of the public format, and what config.json says beside the sizes."""


class RecurrentHead(Head):
    """Draws a chain from its own outputs, through decoder layers with a cache.

    Attributes:
        layers: its decoder layers.
        positions: of the slots.
    """

    layers: nn.ModuleList

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = Positions(config)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.layers]

    @abstractmethod
    def read(self, features: Tensor) -> Tensor:
        """Features [B, T, W] to what step 0 takes for a state, [B, T, H]."""

    @abstractmethod
    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Residual stream f32[B, n, H] of a step, and what a wide first layer attends over beside it."""

    @abstractmethod
    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind the last layer to what lm_head reads and what the next step takes for a state."""


class MTPHead(RecurrentHead):
    """One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2), or an EAGLE-1 head.

    With norms it is fed and feeds back post-norm states, so that states, outputs and recursion live in one space.
    Without them it is EAGLE-1 (arXiv 2401.15077, section 3): no norm on what enters, none in the first layer's
    attention, none at the end.

    Args:
        config: sizes of the target.
        layers: decoder layers.
        norms: all or none.
    """

    features = ("final",)
    lead = 1
    returns_states = True

    def __init__(self, config: ModelConfig, layers: int = 1, norms: str = "all") -> None:
        super().__init__(config)
        if norms not in ("all", "none"):
            raise InvalidArgumentError(f"norms is {norms!r}; must be all or none")
        hidden, eps, has_norms = config.hidden_size, config.rms_eps, norms == "all"
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps) if has_norms else None for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        first = DecoderLayer(config, input_norm=has_norms)
        self.layers = nn.ModuleList([first, *(DecoderLayer(config) for _ in range(layers - 1))])

    def read(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        both = torch.cat((_normed(self.enorm, embeddings), _normed(self.hnorm, states)), dim=-1)
        return self.eh_proj(both).float(), None

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = _normed(self.norm, x)
        return out, out

    @torch.no_grad()
    def initialise(self, weights: Weights) -> None:
        """Starts as a head that passes h_i on: layers are the target's last, made small beside the state.

        A layer of the target adds to a residual stream some 28 times as large (SmolLM2; others are alike) as the unit
        that a norm leaves, so its outputs are scaled by that; left as they are, training spends its first third on it.
        """
        hidden = self.config.hidden_size
        self.eh_proj.weight.normal_(0, 0.02)
        self.eh_proj.weight[:, hidden:] = torch.eye(hidden)
        for i, layer in enumerate(self.decoder_layers, start=self.config.layers - len(self.layers)):
            copy_layer(layer, weights, i)
        if self.hnorm is None or self.norm is None:
            return
        final = weights["model.norm.weight"].float()
        # Undoes the target's last norm: what eh_proj gets is the direction of the pre-norm state.
        small = torch.where(final < 0, -0.2, 0.2)
        self.hnorm.weight.copy_(final.pow(2).mean().sqrt() / torch.where(final.abs() < 0.2, small, final))
        self.norm.weight.copy_(final)
        for layer in self.decoder_layers:
            _make_small(layer)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.enorm is None or self.hnorm is None or self.norm is None:
            tensors: dict[str, Tensor] = {"fc.weight": self.eh_proj.weight}
            for i, layer in enumerate(self.layers):
                tensors |= _prefixed(layer, f"layers.{i}")
            return tensors, {"architectures": ["LlamaForCausalLM"], "bias": False}
        name = "model.layers.0"
        tensors = {f"{name}.eh_proj.weight": self.eh_proj.weight, f"{name}.shared_head.norm.weight": self.norm.weight}
        tensors |= {f"{name}.enorm.weight": self.enorm.weight, f"{name}.hnorm.weight": self.hnorm.weight}
        for i, layer in enumerate(self.layers):
            tensors |= _prefixed(layer, name if i == 0 else f"{name}.layers.{i}")
        switches = {"h_source": "post_norm", "feedback": "post_norm", "norms": "all", "num_nextn_predict_layers": 1}
        return tensors, {"architectures": ["PilotfishMTP"], **switches}


_STREAM_SCALE = 1 / 28


class Eagle3Head(RecurrentHead):
    """EAGLE-3 (arXiv 2503.01840, section 3): three states of the target's residual stream, fused by ``fc``.

    Its outputs mean nothing to the target: they are trained by what lm_head makes of them alone, and go back as they
    are.

    Args:
        config: sizes of the target.
        layers: decoder layers.
    """

    lead = 1
    returns_states = False

    def __init__(self, config: ModelConfig, layers: int = 1) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self._taken = default_layers(config.layers)
        if len(set(self._taken)) < len(self._taken):
            raise InvalidArgumentError(
                f"scheme is 'eagle3'; a target of {config.layers} layers has no three states apart"
            )
        self.features = tuple(f"hidden.{i}" for i in self._taken)
        self.fc = nn.Linear(len(self._taken) * hidden, hidden, bias=False)
        first = DecoderLayer(config, wide=True)
        self.layers = nn.ModuleList([first, *(DecoderLayer(config) for _ in range(layers - 1))])
        self.norm = RMSNorm(hidden, config.rms_eps)

    def read(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features.to(self.fc.weight.dtype))
        return fused.float()

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        return states, embeddings

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x

    @torch.no_grad()
    def initialise(self, weights: Weights) -> None:
        """Starts as the target's last layers on the latest of the three states, all made small as in ``MTPHead``."""
        hidden = self.config.hidden_size
        self.fc.weight.normal_(0, 0.002)
        self.fc.weight[:, -hidden:] += _STREAM_SCALE * torch.eye(hidden)
        first = self.config.layers - len(self.layers)
        for i, layer in enumerate(self.decoder_layers, start=first):
            copy_layer(layer, weights, i)
            _make_small(layer)
        wide = self.decoder_layers[0]
        assert wide.hidden_norm is not None
        assert wide.input_layernorm is not None
        wide.hidden_norm.weight.copy_(weights[f"model.layers.{first}.input_layernorm.weight"])
        wide.input_layernorm.weight.fill_(1.0)
        self.norm.weight.copy_(weights["model.norm.weight"])

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {"fc.weight": self.fc.weight, "norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            tensors |= _prefixed(layer, "midlayer" if i == 0 else f"layers.{i}")
        aux = {"eagle_aux_hidden_state_layer_ids": list(self._taken), "use_aux_hidden_state": True}
        return tensors, {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": aux}


class DraftModel(RecurrentHead):
    """A small language model cut from the target: some of its layers, its embeddings and its lm_head.

    Args:
        config: sizes of the target.
        taken: which of the target's layers it begins from, ascending.
    """

    features = ()
    lead = 0
    returns_states = True

    def __init__(self, config: ModelConfig, taken: Sequence[int]) -> None:
        super().__init__(config)
        if not taken or list(taken) != sorted(set(taken)) or not 0 <= taken[0] <= taken[-1] < config.layers:
            raise InvalidArgumentError(
                f"draft_layers is {list(taken)}; must be ascending numbers of the target's {config.layers} layers"
            )
        self._taken = tuple(taken)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in taken)
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)

    def read(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        return embeddings.float(), None

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x

    @torch.no_grad()
    def initialise(self, weights: Weights) -> None:
        for layer, i in zip(self.decoder_layers, self._taken, strict=True):
            copy_layer(layer, weights, i)
        self.norm.weight.copy_(weights["model.norm.weight"])

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {"model.norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            tensors |= _prefixed(layer, f"model.layers.{i}")
        return tensors, {"architectures": ["LlamaForCausalLM"]}


class MedusaHeads(Head):
    """Medusa (Cai et al., arXiv 2401.10774, section 3.1): head j says token i + 2 + j from h_i alone.

    All of them end in the target's lm_head, so that a head is no more than its blocks.

    Args:
        config: sizes of the target.
        heads: how many.
        blocks: residual blocks x + SiLU(W x + b) of each.
    """

    features = ("final",)
    lead = 1
    returns_states = True

    def __init__(self, config: ModelConfig, heads: int, blocks: int = 1) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks)) for _ in range(heads)
        )

    @property
    def depth(self) -> int | None:
        return len(self.blocks)

    def forward(self, states: Tensor, number: int) -> Tensor:
        """What lm_head reads for head ``number``, f32[..., H], from post-norm states."""
        x = states.float()
        for block in cast(nn.ModuleList, self.blocks[number]):
            x = x + F.silu(block(x)).float()
        return x

    @torch.no_grad()
    def initialise(self, weights: Weights) -> None:
        """Starts as the target's own next token, as the paper's heads do."""
        for parameter in self.parameters():
            parameter.zero_()

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for j, blocks in enumerate(self.blocks):
            for i, block in enumerate(cast(nn.ModuleList, blocks)):
                tensors |= {f"blocks.{j}.layers.{i}.{name}": p for name, p in block.named_parameters()}
        settings = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": len(self.blocks)}
        settings |= {"original_lm_head": True, "medusa_fc_bias": True, "hidden_size": self.config.hidden_size}
        depth = len(cast(nn.ModuleList, self.blocks[0]))
        return tensors, settings | {"num_hidden_layers": depth, "vocab_size": self.config.vocab_size}


def layer_sizes(config: ModelConfig) -> ModelConfig:
    """The target's sizes as a head's layers have them: Llama's, without biases or norms of q and k."""
    return replace(config, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False)


def copy_layer(layer: DecoderLayer, weights: Weights, index: int) -> None:
    """Copies the target's layer ``index``; columns and norms that the target does not have are left as they are.

    In a wide layer the target's columns are those that read the state; the others begin small.
    """
    for name, parameter in layer.named_parameters():
        if name == "hidden_norm.weight":
            continue
        stored = weights[f"model.layers.{index}.{name}"].float()
        if parameter.shape == stored.shape:
            parameter.copy_(stored)
        else:
            parameter.normal_(0, 0.02)
            parameter[:, -stored.shape[1] :] = stored


def _make_small(layer: DecoderLayer) -> None:
    """Scales what a layer of the target adds, for a residual stream that is as much smaller."""
    layer.self_attn.o_proj.weight.mul_(_STREAM_SCALE)
    layer.mlp.down_proj.weight.mul_(_STREAM_SCALE)


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    out: Tensor = x.float() if norm is None else norm(x)
    return out


def _prefixed(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": parameter for name, parameter in layer.named_parameters()}
