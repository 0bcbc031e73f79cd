"""The kernels against plain torch, layer by layer, and what they promise beyond it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, token_rows
from torch import Tensor
from torch.nn import functional

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.models.native_kernels import NativeLayers
from pilotfish.runtime.models.torch_kernels import TorchLayers
from pilotfish.runtime.native import library as native
from pilotfish.runtime.native.linear import Arena, NativeLinear, packed_size
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.quantization import QuantizedLinear, dequantize, quantize

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")

TOKENS = np.random.default_rng(0).integers(4, 280, 200).tolist()


@pytest.fixture(scope="session")
def portable_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels for any processor are kept."""
    return tmp_path_factory.mktemp("portable")


@pytest.fixture(params=["this processor", "any processor"])
def processor(request: pytest.FixtureRequest, portable_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the code for processors without AVX-512."""
    if request.param == "any processor":
        portable = tuple("-march=x86-64-v2" if flag == "-march=native" else flag for flag in native._FLAGS)
        if native.platform.machine() != "x86_64":
            pytest.skip("knows how to ask for a plain x86 only")
        monkeypatch.setattr(native, "_FLAGS", portable)
        monkeypatch.setenv("PILOTFISH_HOME", str(portable_home))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def multiply(layer: NativeLinear, x: Tensor, norm: Tensor | None = None) -> Tensor:
    y = torch.full((len(x), layer.outputs), torch.nan)
    part = native.Part(x.data_ptr(), x.stride(0), x.shape[1], None if norm is None else norm.data_ptr())
    arguments = (ctypes.byref(layer.struct), part, 1, 1e-5, len(x), layer.outputs, 2, y.data_ptr())
    native.library().pilotfish_linear(*arguments)
    return y


def arena_for(weight: Tensor) -> Arena:
    return Arena(packed_size(weight, quantized=False))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_products_are_those_of_torch(kind: str) -> None:
    """Any number of rows, widths that fill no whole panel, with bias and norm or not."""
    for rows in [*range(1, 14), 37]:
        weight, bias, x, norm = random(70, 96, seed=rows), random(70, seed=1), random(rows, 96, seed=2), random(96)
        weight = weight if kind == "float32" else weight.bfloat16()
        layer = NativeLinear(weight, bias, arena_for(weight), quantized=kind == "int8")
        normed = functional.rms_norm(x, (96,), norm, 1e-5)
        for got, given in ((multiply(layer, x), x), (multiply(layer, x, norm), normed)):
            if kind == "int8":
                wanted = QuantizedLinear(weight, bias)(given)
            else:
                seen = given if kind == "float32" else given.bfloat16().float()
                wanted = functional.linear(seen, weight.float(), bias)
            # An activation that lies between two steps may be rounded either way by a sum's last bit.
            torch.testing.assert_close(got, wanted, atol=1e-4 if kind == "float32" else 0.05, rtol=0)
            assert (got - wanted).abs().mean() < (1e-5 if kind != "int8" else 1e-3)


@pytest.mark.usefixtures("processor")
def test_embeddings_come_out_of_the_packed_head(model_folder: Callable[..., Path]) -> None:
    ids = torch.tensor([5, 0, 95, 5, 33])
    for weight, quantized in ((random(96, 64), False), (random(96, 64).bfloat16(), False), (random(96, 64), True)):
        layer = NativeLinear(weight, None, arena_for(weight), quantized=quantized)
        out = torch.empty(len(ids), 64)
        native.library().pilotfish_embed(ctypes.byref(layer.struct), ids.data_ptr(), len(ids), out.data_ptr())
        wanted = dequantize(*quantize(weight))[ids] if quantized else weight[ids].float()
        torch.testing.assert_close(out, wanted, atol=0, rtol=0)


def test_int8_weights_are_as_near_as_int8_can_be() -> None:
    weight = random(40, 96)
    weight[3, 32:64] = 0
    codes, scales = quantize(weight)
    assert codes.dtype is torch.int8
    assert scales.shape == (40, 3)
    error = (dequantize(codes, scales) - weight).abs().unflatten(-1, (-1, 32)).amax(-1)
    # Half a step; the largest weight of a group may fall beyond the last step by the rounding of the scale.
    assert (error <= scales.float() * (0.5 + 127 / 256) + 1e-7).all()
    assert (dequantize(codes, scales)[3, 32:64] == 0).all()


def states(folder: Path, rows: list[list[Row]], **options: Any) -> Tensor:
    """Every layer's hidden states and the final one, of all the tokens of some steps."""
    model = load_model(folder, device="cpu", **options)
    names = (*(f"hidden.{i}" for i in range(model.config.layers + 1)), "final")
    paged = PagedModel(model, pages=80, features=names)
    with torch.inference_mode():
        return torch.cat([paged.extend(token_rows(*step)).features.float() for step in rows])


STEPS = [
    [Row(TOKENS[:40], 0, [3, 1, 7]), Row(TOKENS[:7], 0, [9])],
    [Row(TOKENS[40:43], 40, [3, 1, 7], [-1, 0, 0]), Row(TOKENS[7:8], 7, [9]), Row(TOKENS[:2], 0, [20])],
]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_layer_by_layer_as_in_torch(family: str, kind: str, model_folder: Callable[..., Path]) -> None:
    """bfloat16 is compared with what float32 makes of the same weights, since torch rounds everything else too."""
    folder = model_folder(family, layers=3, tie_word_embeddings=family == "llama", dtype=torch.bfloat16)
    dtype, quantize = ("float32", kind) if kind == "int8" else (kind, "none")
    fast = states(folder, STEPS, dtype=dtype, quantize=quantize)
    slow = states(folder, STEPS, dtype="float32", quantize=quantize, kernels="torch")
    tolerance = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03}[kind]
    assert (fast - slow).norm() < tolerance * slow.norm()
    assert fast.isfinite().all()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}], ids=str)
def test_a_token_has_the_same_numbers_in_any_company(
    options: dict[str, str], model_folder: Callable[..., Path]
) -> None:
    """To the last bit: alone or in a batch, token by token or in one chunk, on whatever pages."""
    folder = model_folder(layers=3)
    others = [Row(TOKENS[i : i + 11 + i], 0, [30 + 3 * i, 31 + 3 * i, 32 + 3 * i]) for i in range(9)]
    alone = states(folder, [[Row([token], i, [3, 1, 7])] for i, token in enumerate(TOKENS[:40])], **options)
    chunk = states(folder, [[*others, Row(TOKENS[:40], 0, [8, 2, 5])]], **options)[-40:]
    assert torch.equal(alone, chunk)


def test_angles_reach_as_far_as_a_position_asks(model_folder: Callable[..., Path]) -> None:
    layers = load_model(model_folder(), device="cpu").decoder.layers
    assert isinstance(layers, NativeLayers)
    for position in (0, 1023, 1024, 3000, 5):
        wanted = layers._rope.tables(torch.tensor([position]), torch.float32)
        for table, row in zip(layers._angles(position), wanted, strict=True):
            assert torch.equal(table[position], row[0])


def test_two_threads_may_run_one_model(model_folder: Callable[..., Path]) -> None:
    """As a target that is its own draft does in the tests of whole deployments."""
    model = load_model(model_folder(layers=3), device="cpu")

    def run(seed: int) -> Tensor:
        paged, tokens = PagedModel(model, pages=8), TOKENS[seed : seed + 60]
        with torch.inference_mode():
            return torch.cat([paged.extend(token_rows(Row([t], i, range(4)))).last for i, t in enumerate(tokens)])

    expected = [run(seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        for got, wanted in zip(pool.map(run, [0, 1] * 4), expected * 4, strict=True):
            assert torch.equal(got, wanted)


def test_kernels_are_taken_where_they_can_be(model_folder: Callable[..., Path]) -> None:
    assert isinstance(load_model(model_folder(), device="cpu").decoder.layers, NativeLayers)
    assert isinstance(load_model(model_folder(), device="cpu", kernels="torch").decoder.layers, TorchLayers)
    assert isinstance(load_model(model_folder(), device="cpu", dtype="float16").decoder.layers, TorchLayers)
    assert isinstance(load_model(model_folder(intermediate_size=104), device="cpu").decoder.layers, TorchLayers)
    with pytest.raises(InvalidArgumentError, match=r"kernels is native.*float16"):
        load_model(model_folder(), device="cpu", dtype="float16", kernels="native")
    with pytest.raises(InvalidArgumentError, match=r"quantize is 'int8'.*104"):
        load_model(model_folder(intermediate_size=104), device="cpu", quantize="int8")


def test_a_quantized_model_has_another_name_and_hash(model_folder: Callable[..., Path]) -> None:
    plain, rounded = (load_model(model_folder(), device="cpu", quantize=how) for how in ("none", "int8"))
    assert rounded.model_id == f"{plain.model_id}:int8"
    assert rounded.weights_hash != plain.weights_hash


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_models_run_in_torch_and_the_log_says_why(
    compiler: str,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = model_folder()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PILOTFISH_HOME", str(tmp_path))
    native.library.cache_clear()
    native._warn_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert isinstance(load_model(folder, device="cpu").decoder.layers, TorchLayers)
            assert isinstance(load_model(folder, device="cpu").decoder.layers, TorchLayers)
    finally:
        native.library.cache_clear()
    assert caplog.text.count("plain torch") == 1


def test_the_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_HOME", str(tmp_path))
    path = native._compiled()
    before = path.stat().st_mtime_ns
    assert native._compiled() == path
    assert path.stat().st_mtime_ns == before
    assert [file.name for file in path.parent.iterdir()] == [path.name], "scratch files are left"
