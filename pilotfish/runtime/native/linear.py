"""Linear layers in the panels that the kernels read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime.native.library import Linear, library
from pilotfish.runtime.quantization import quantize

PANEL = 16  # outputs side by side; the kernels take panels in pairs
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_UNITS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}  # neighbouring inputs kept together


class NativeLinear:
    """A packed layer: its weights live here and nowhere else.

    Args:
        weight: float32 or bfloat16 [out, in]; ``in`` a multiple of 32.
        bias: [out], or None.
        quantized: round the weights to int8.

    Attributes:
        struct: for the kernels; good as long as this object lives.
        outputs: rows of ``weight``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, quantized: bool = False) -> None:
        self.outputs, inputs = weight.shape
        padding = -self.outputs % (2 * PANEL)
        weight = functional.pad(weight, (0, 0, 0, padding))
        self._scales: Tensor | None = None
        if quantized:
            codes, scales = quantize(weight)
            weight = (codes.to(torch.int16) + 128).to(torch.uint8)
            self._scales = _pack(scales, 1)
        self._weights = _pack(weight, _UNITS[weight.dtype])
        self._bias = None if bias is None else functional.pad(bias.float(), (0, padding))
        self.struct = Linear(
            kind=_KINDS[weight.dtype],
            outputs=len(weight),
            inputs=inputs,
            weights=self._weights.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two layers by turns, a panel each, so that one pass yields both factors of a gated unit."""
    return torch.stack([gate.unflatten(0, (-1, PANEL)), up.unflatten(0, (-1, PANEL))], dim=1).flatten(0, 2)


def _pack(weight: Tensor, unit: int) -> Tensor:
    """The same values as [out / 16, in / unit, 16, unit]."""
    weight = weight.contiguous()
    packed = torch.empty_like(weight)
    library().pilotfish_pack(weight.element_size(), weight.data_ptr(), *weight.shape, unit, packed.data_ptr())
    return packed
