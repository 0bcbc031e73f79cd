"""Tensors as the arrays that the contract carries; bfloat16 travels as its bits in uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_wire(tensor: Tensor) -> npt.NDArray[Any]:
    """The values in host memory; uint16 bits for bfloat16."""
    host = tensor.detach().cpu()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()
