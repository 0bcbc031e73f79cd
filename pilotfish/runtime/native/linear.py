"""Linear layers in the panels that the kernels read."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime.native.library import Linear, library
from pilotfish.runtime.quantization import GROUP, quantize

PANEL = 32  # outputs side by side
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_HUGE_PAGE, _CACHE_LINE = 1 << 21, 64
_UNITS = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}  # neighbouring inputs kept together


class Arena:
    """One piece of memory for all the weights of a model, in huge pages where the system has them.

    A step reads all of it from end to end; with pages of 4 KiB it would look up an address at every page, and lose what
    the processor fetches ahead.

    Args:
        size: bytes that will be taken, with up to 64 for each tensor.
    """

    def __init__(self, size: int) -> None:
        memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
        self._free = memory[-memory.data_ptr() % _HUGE_PAGE :]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            libc = ctypes.CDLL(None)  # advice that is not taken does no harm
            libc.madvise(ctypes.c_void_p(self._free.data_ptr()), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = shape.numel() * dtype.itemsize
        taken, self._free = self._free[:size], self._free[size + -size % _CACHE_LINE :]
        return taken.view(dtype).view(shape)


def packed_size(weight: Tensor, quantized: bool) -> int:
    """Bytes that a layer takes of its arena."""
    values = (len(weight) + -len(weight) % PANEL) * weight.shape[1]
    size = values * weight.element_size() if not quantized else values + 2 * values // GROUP
    return size + 2 * _CACHE_LINE


class NativeLinear:
    """A packed layer: its weights live here and nowhere else.

    Args:
        weight: float32 or bfloat16 [out, in]; ``in`` a multiple of 32.
        bias: [out], or None.
        arena: gives the memory.
        quantized: round the weights to int8.

    Attributes:
        struct: for the kernels; good as long as this object lives.
        outputs: rows of ``weight``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena, *, quantized: bool = False) -> None:
        self.outputs, inputs = weight.shape
        padding = -self.outputs % PANEL
        weight = functional.pad(weight, (0, 0, 0, padding))
        self._scales: Tensor | None = None
        if quantized:
            codes, scales = quantize(weight)
            weight = (codes.to(torch.int16) + 128).to(torch.uint8)
            self._scales = _pack(scales, 1, arena)
        self._weights = _pack(weight, _UNITS[weight.dtype], arena)
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
    """Rows of two layers by turns, half a panel each, so that a panel yields both factors of its gated units."""
    return torch.stack([gate.unflatten(0, (-1, PANEL // 2)), up.unflatten(0, (-1, PANEL // 2))], dim=1).flatten(0, 2)


def _pack(weight: Tensor, unit: int, arena: Arena) -> Tensor:
    """The same values as [out / 32, in / unit, 32, unit]."""
    weight = weight.contiguous()
    packed = arena.take(weight.shape, weight.dtype)
    library().pilotfish_pack(weight.element_size(), weight.data_ptr(), *weight.shape, unit, packed.data_ptr())
    return packed
