"""Linear layers, with weights in the form in which they multiply fastest.

On a CPU ``functional.linear`` leaves oneDNN to arrange the weights anew at every call, or to run a
kernel that does not need it; either costs most at the few rows that decoding and verification have.
Arranged once (SmolLM2-135M, one thread, all layers and the head): five rows take 26 ms instead of
54 in fp32, 16 instead of 31 in bf16, and 512 rows a tenth less.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime.quantization import QuantizedLinear

_ROWS_EXPECTED = 8  # what oneDNN chooses the arrangement for; larger batches lose nothing by it


class Linear(Protocol):
    """x @ weight.T + bias: [rows, in] to [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


def make_linear(weight: Tensor, bias: Tensor | None, *, quantized: bool = False) -> Linear:
    """The fastest form for the weight's device and dtype.

    Args:
        weight: [out, in]; a packed form is a copy, so the caller should not hold on to it.
        bias: [out], or None.
        quantized: round the weights to int8.
    """
    if quantized:
        return QuantizedLinear(weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


class DenseLinear:
    """Plain torch, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN, arranged once. Only where ``can_pack``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_EXPECTED)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor can, found out by trying; float16 is left alone."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(torch.ones(4, 8, dtype=dtype), None)(torch.ones(2, 8, dtype=dtype))
    except (RuntimeError, AttributeError):  # no such operator, or none for this dtype here
        return False
    return True
