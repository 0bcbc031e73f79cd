"""Which kernels run a model: fused ones on a CPU where they can, else plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.models.layers import Kernels
from pilotfish.runtime.models.native_kernels import NativeKernels, why_not_native
from pilotfish.runtime.models.torch_kernels import TorchKernels
from pilotfish.runtime.quantization import GROUP


def choose_kernels(
    name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str = "none",
    inputs: Sequence[int] = (),
) -> Kernels:
    """Kernels for a model.

    Args:
        name: native, torch, or auto: native where that can be.
        config: sizes of its layers.
        dtype: of weights and cache.
        device: where everything lies.
        quantize: none or int8.
        inputs: widths of inputs of further linear layers, each part of a ``Projection`` by itself.

    Raises:
        InvalidArgumentError: if the model cannot be run as asked.
    """
    widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim, *inputs)
    quantized = quantize != "none"
    if quantized and any(width % GROUP for width in widths):
        raise InvalidArgumentError(f"quantize is {quantize!r}; it needs widths in multiples of {GROUP}, not {widths}")
    if name != "torch":
        reason = why_not_native(widths, config.head_dim, dtype, device)
        if reason is None:
            return NativeKernels(dtype, device, quantized=quantized)
        if name == "native":
            raise InvalidArgumentError(f"kernels is native; {reason}")
    return TorchKernels(dtype, device, quantized=quantized)
