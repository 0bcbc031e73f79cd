"""Rotary position embedding and its stretched forms.

RoFormer (Su et al., arXiv 2104.09864) with the half-split layout of Hugging Face: dimension i is
rotated together with dimension i + head_dim / 2. ``linear`` divides positions (Chen et al., arXiv
2306.15595); ``llama3`` divides slow frequencies and keeps fast ones (Llama 3.1 release); ``yarn``
ramps between both and scales the attention (Peng et al., arXiv 2309.00071, sections 3.2 to 3.4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pilotfish.runtime.config import RopeConfig


class Rope:
    """Rotates queries and keys.

    Args:
        config: kind and stretch.
        head_dim: values per head, even.
        device: where positions will come from.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        # Computed on the CPU whatever the device, so that every device uses the same numbers.
        self._frequencies = _frequencies(config, head_dim).to(device)
        self._scale = _attention_scale(config)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step, each [tokens, 1, head_dim]; ``positions`` i64[tokens]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [tokens, heads, head_dim] turned by the angles of ``Rope.tables``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, f32[head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    match config.type:
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, plain, head_dim)
    return plain


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Weight of the unstretched frequency grows with its turns within the trained length."""
    turns = config.original_max_len * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """A ramp over dimensions, from kept (more than beta_fast turns) to divided (fewer than beta_slow)."""

    def dimension(turns: float) -> float:
        wavelength = config.original_max_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain * (1 - stretched) + plain / config.factor * stretched


def _attention_scale(config: RopeConfig) -> float:
    """Factor on cosines and sines, whose square sharpens the attention of a stretched yarn model."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)
