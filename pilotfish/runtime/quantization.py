"""Weights as int8: groups of 32 along the inputs share a scale, rounded to nearest.

Activations are rounded in the same way as they come, so that products are sums of integers. That is what
llama.cpp's Q8_0 does. The model is another one than the checkpoint's: nearly the same, never exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
_LARGEST = 127


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds weights [out, in], ``in`` a multiple of 32.

    Returns:
        int8 [out, in] and scales bfloat16 [out, in / 32]: weight ≈ int8 * scale.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / _LARGEST).bfloat16()
    wide = scales.float().unsqueeze(-1)  # rounded before it divides, so that its own rounding costs nothing
    codes = (groups / torch.where(wide == 0, 1.0, wide)).round().clamp(-_LARGEST, _LARGEST)
    return codes.flatten(-2).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights that the integers stand for, f32[out, in]."""
    groups = codes.float().view(len(codes), -1, GROUP)
    return (groups * scales.float().unsqueeze(-1)).view(codes.shape)


class QuantizedLinear:
    """Plain torch, on any device: saves memory, not time. What the kernels do, as arithmetic.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._codes, self._scales = quantize(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, GROUP))
        scales = groups.abs().amax(-1, keepdim=True) / _LARGEST
        rounded = (groups / torch.where(scales == 0, 1.0, scales)).round() * scales
        weight = dequantize(self._codes, self._scales)
        return functional.linear(rounded.flatten(-2), weight, self._bias).to(x.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weights, f32[n, in]: embeddings that are tied to this layer."""
        return dequantize(self._codes.index_select(0, index), self._scales.index_select(0, index))
