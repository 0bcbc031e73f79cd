"""Arrays of steps, and checks that name what is wrong with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.errors import refusal

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def empty_bytes() -> Bytes:
    return np.zeros(0, np.uint8)


def empty_ints() -> Ints:
    return np.zeros(0, np.int32)


def empty_floats() -> Floats:
    return np.zeros(0, np.float32)


def require(condition: bool | np.bool_, field_name: str, value: object, limit: str) -> None:
    """Raises ``InvalidArgumentError`` naming field, value and limit unless the condition holds."""
    if not condition:
        raise refusal(field_name, value, limit)


def require_range(values: npt.NDArray[Any], field_name: str, low: float, high: float, limit: str) -> None:
    """Requires ``low <= value <= high`` of every element; NaN fails."""
    if values.size and not (values.min() >= low and values.max() <= high):
        index = int((~((values >= low) & (values <= high))).argmax())
        require(False, f"{field_name}[{index}]", values.flat[index], limit)
