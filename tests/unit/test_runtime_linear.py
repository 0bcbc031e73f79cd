"""Packed weights against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model

from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.linear import DenseLinear, PackedLinear, can_pack, make_linear
from pilotfish.runtime.models.decoder import Decoder
from pilotfish.runtime.models.torch_kernels import TorchKernels
from pilotfish.runtime.weights import load_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_is_dense(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this processor or torch packs no {dtype}")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    with torch.inference_mode():
        packed, dense = PackedLinear(weight, bias)(x), DenseLinear(weight, bias)(x)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(packed, dense, rtol=tolerance, atol=tolerance * 8)


def test_other_dtypes_stay_dense() -> None:
    weight = torch.ones(4, 8, dtype=torch.float16)
    assert not can_pack(torch.float16)
    assert isinstance(make_linear(weight, None), DenseLinear)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_decoder_keeps_no_weight_twice(family: str, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_model(tmp_path, family))
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    assert weights
    Decoder(config, weights, TorchKernels(torch.float32, CPU))
    assert not weights, "what is left would be held beside its packed form"
