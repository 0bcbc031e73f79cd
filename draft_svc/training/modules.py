"""What heads are made of, as torch modules to be trained: RMS norm, attention, SwiGLU; names as in Hugging Face files.

``pilotfish.runtime`` computes the same from pages of KV and without gradients; a test holds the two together. Attention
here knows one shape of context: that of a head unrolled over its own outputs ("training-time test", EAGLE-3,
arXiv 2503.01840, section 3.2; HEADS.md, section 3.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.models.rope import Rope

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, each f32[B, n, 1, head_dim]."""


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32 whatever comes in.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self.weight
        return normed


class Context:
    """Keys and values that the slots of one layer attend to, while a head is unrolled.

    Step 0 has all slots of a document, each seeing itself and those before. A later step has chosen slots only; the
    k-th step of slot i stands for the k-th draft token after slot i, so it sees step 0 up to slot i, and of every
    later step its own slot alone. Key positions differ accordingly: i + k for step k.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._hidden: Tensor | None = None

    def choose(self, slots: Tensor) -> None:
        """Says which slots later steps have, i64[B, n]."""
        keys = self._steps[0][0]
        seen = torch.arange(keys.shape[2], device=slots.device) <= slots.unsqueeze(-1)
        self._hidden = ~seen[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds a step and returns what its queries gather.

        Args:
            q: [B, heads, n, d], rotated.
            k: [B, kv_heads, n, d], rotated.
            v: as k.

        Returns:
            As q.
        """
        self._steps.append((k, v))
        if len(self._steps) == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._attend_later(q)

    def _attend_later(self, q: Tensor) -> Tensor:
        (keys, values), later = self._steps[0], self._steps[1:]
        batch, heads, n, d = q.shape
        kv_heads, length = keys.shape[1], keys.shape[2]
        assert self._hidden is not None, "choose the slots first"
        q = (q * d**-0.5).reshape(batch, kv_heads, heads // kv_heads * n, d)
        grouped = q.view(batch, kv_heads, -1, n, d)
        scores = torch.matmul(q, keys.transpose(-1, -2)).float().view(batch, kv_heads, -1, n, length)
        scores = scores.masked_fill(self._hidden, float("-inf"))
        own = [(grouped * k.unsqueeze(2)).sum(-1, keepdim=True).float() for k, _ in later]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(values.dtype)
        shared = weights[..., :length].reshape(batch, kv_heads, -1, length)
        out = torch.matmul(shared, values).view(batch, kv_heads, -1, n, d)
        for i, (_, v) in enumerate(later, start=length):
            out = out + weights[..., i : i + 1] * v.unsqueeze(2)
        return out.reshape(batch, heads, n, d)


class Attention(nn.Module):
    """Self-attention with grouped queries and rotary positions.

    Args:
        config: sizes.
        width: of what it reads.
    """

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Angles, context: Context) -> Tensor:
        """``x`` [B, n, width] to f32[B, n, hidden]; the slots join the context."""
        q = _rotate(self._split(self.q_proj(x), self._heads), angles)
        k = _rotate(self._split(self.k_proj(x), self._kv_heads), angles)
        v = self._split(self.v_proj(x), self._kv_heads)
        out = context.attend(*(y.transpose(1, 2) for y in (q, k, v)))
        gathered: Tensor = self.o_proj(out.transpose(1, 2).flatten(2)).float()
        return gathered

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self._head_dim)


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)).float()
        return out


class DecoderLayer(nn.Module):
    """A decoder layer of Llama's kind around a residual stream in float32.

    Args:
        config: sizes.
        input_norm: whether it norms what its attention reads; the first layer of EAGLE-1 does not.
        wide: its attention reads the normed embedding beside the normed state (EAGLE-3's first layer).
    """

    def __init__(self, config: ModelConfig, *, input_norm: bool = True, wide: bool = False) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_eps
        self.input_layernorm = RMSNorm(hidden, eps) if input_norm else None
        self.hidden_norm = RMSNorm(hidden, eps) if wide else None
        self.self_attn = Attention(config, 2 * hidden if wide else hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Angles, context: Context, embedding: Tensor | None = None) -> Tensor:
        """One layer further.

        Args:
            x: residual stream, f32[B, n, hidden].
            angles: of the slots' positions.
            context: of this layer.
            embedding: [B, n, hidden], of a wide layer.
        """
        read = x
        if self.hidden_norm is not None:
            assert embedding is not None
            assert self.input_layernorm is not None
            read = torch.cat((self.input_layernorm(embedding), self.hidden_norm(x)), dim=-1)
        elif self.input_layernorm is not None:
            read = self.input_layernorm(x)
        x = x + self.self_attn(read, angles, context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Positions(nn.Module):
    """Angles of rotary positions.

    Args:
        config: of the model whose positions they are.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self._ropes: dict[torch.device, Rope] = {}

    def forward(self, positions: Tensor) -> Angles:
        """Angles of ``positions``, i64[B, n]."""
        device = positions.device
        if device not in self._ropes:
            self._ropes[device] = Rope(self._config.rope, self._config.head_dim, device)
        cos, sin = self._ropes[device].tables(positions.flatten(), torch.float32)
        return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    """``x`` [B, n, heads, head_dim] turned; see ``pilotfish.runtime.models.rope``."""
    cos, sin = angles
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)
