"""Layers, projections and output heads against their definitions, written out in float64 without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import Row, token_rows
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.batch import build_batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.models.kernels import choose_kernels
from pilotfish.runtime.models.layers import Kernels, Layers
from pilotfish.runtime.native.library import is_available

CPU = torch.device("cpu")
HIDDEN, INNER, EPS = 64, 96, 1e-5
PAGES = [5, 0, 3]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def config(layers: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": EPS,
            "max_position_embeddings": 256,
        }
    )


def layer_weights(prefix: str, seed: int, *, columns: int = HIDDEN, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Every tensor that a layer may have, but those whose names end with one of ``without``."""
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "hidden_norm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "self_attn.q_proj.weight": (64, columns),
        "self_attn.k_proj.weight": (32, columns),
        "self_attn.v_proj.weight": (32, columns),
        "self_attn.o_proj.weight": (HIDDEN, 64),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "self_attn.q_proj.bias": (64,),
        "self_attn.k_proj.bias": (32,),
        "self_attn.v_proj.bias": (32,),
    }
    weights = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if name.endswith(without):
            continue
        noise = random(*shape, seed=100 * seed + i)
        weights[f"{prefix}.{name}"] = 1 + 0.2 * noise if "norm" in name else noise / math.sqrt(shape[-1])
    return weights


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def twin(weights: dict[str, Tensor], prefix: str, x: Tensor, beside: Tensor | None) -> Tensor:
    """One layer over a whole row at positions 0 and up, [n, hidden] in float64."""

    def get(name: str) -> Tensor | None:
        found = weights.get(f"{prefix}.{name}")
        return None if found is None else found.double()

    def linear(name: str, x: Tensor) -> Tensor:
        bias, weight = get(f"{name}.bias"), get(f"{name}.weight")
        assert weight is not None
        return x @ weight.T + (0 if bias is None else bias)

    h = norm(x, get("input_layernorm.weight"))
    if beside is not None:
        h = torch.cat((norm(beside, get("input_layernorm.weight")), norm(x, get("hidden_norm.weight"))), -1)
    q = norm(linear("self_attn.q_proj", h).unflatten(-1, (4, 16)), get("self_attn.q_norm.weight"))
    k = norm(linear("self_attn.k_proj", h).unflatten(-1, (2, 16)), get("self_attn.k_norm.weight"))
    v = linear("self_attn.v_proj", h).unflatten(-1, (2, 16))
    mixed = torch.zeros(len(x), 4, 16, dtype=torch.float64)
    for i in range(len(x)):
        for head in range(4):
            keys = torch.stack([turned(k[j, head // 2], j) for j in range(i + 1)])
            scores = keys @ turned(q[i, head], i) / 4
            mixed[i, head] = scores.softmax(0) @ v[: i + 1, head // 2]
    x = x + linear("self_attn.o_proj", mixed.flatten(1))
    h = norm(x, get("post_attention_layernorm.weight"))
    gate = linear("mlp.gate_proj", h)
    return x + linear("mlp.down_proj", gate * gate.sigmoid() * linear("mlp.up_proj", h))


def turned(x: Tensor, position: int) -> Tensor:
    angles = position * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    left, right = x[:8], x[8:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()))


def kernels(name: str, dtype: torch.dtype = torch.float32, quantize: str = "none") -> Kernels:
    if name == "native" and not is_available():
        pytest.skip("no C++ compiler here")
    return choose_kernels(name, config(1), dtype, CPU, quantize=quantize)


def run(layers: Layers, dtype: torch.dtype, x: Tensor, beside: Tensor | None, cuts: list[int]) -> Tensor:
    """A row in several steps that end at ``cuts``."""
    cache = KVCache(layers.config, pages=6, page_size=4, dtype=dtype, device=CPU)
    attention, done, start = layers.create_attention(4), [], 0
    for end in cuts:
        batch = build_batch(token_rows(Row([0] * (end - start), start, PAGES)), 4, CPU)
        attention.plan(batch)
        own = None if beside is None else beside[start:end]
        done.append(layers.forward(x[start:end].clone(), batch, cache, attention, own).clone())
        start = end
    return torch.cat(done).double()


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"without": ("hidden_norm.weight", "q_norm.weight", "k_norm.weight", "bias")},
    "qwen2": {"without": ("hidden_norm.weight", "q_norm.weight", "k_norm.weight")},
    "qwen3": {"without": ("hidden_norm.weight", "bias")},
    "eagle": {"without": ("input_layernorm.weight", "hidden_norm.weight", "q_norm.weight", "k_norm.weight", "bias")},
    "eagle3": {"without": ("q_norm.weight", "k_norm.weight", "bias"), "columns": 2 * HIDDEN},
    "eagle3, x normed before": {"without": ("hidden_norm.weight",), "columns": 2 * HIDDEN},
}


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_are_what_they_are_defined_as(variant: str, name: str) -> None:
    """The first layer is of the variant, those behind it are plain, whatever they are called."""
    made = kernels(name)
    weights = layer_weights("midlayer", 1, **VARIANTS[variant])
    for i in (1, 2):
        weights |= layer_weights(f"layers.{i}", 1 + i, **VARIANTS["llama"])
    x = random(10, HIDDEN, seed=7)
    beside = random(10, HIDDEN, seed=8) if "columns" in VARIANTS[variant] else None
    wanted = twin(weights, "midlayer", x.double(), None if beside is None else beside.double())
    for i in (1, 2):
        wanted = twin(weights, f"layers.{i}", wanted, None)
    taken = dict(weights)
    layers = made.layers(config(3), taken, ["midlayer", "layers.1", "layers.2"])
    assert not taken
    for cuts in ([10], [3, 4, 10]):
        torch.testing.assert_close(run(layers, made.dtype, x, beside, cuts), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_smaller_weights_are_as_near_as_they_can_be(variant: str, kind: str) -> None:
    """And no token depends on its company: cut in any way, the numbers are the same to the last bit."""
    dtype, how = (torch.bfloat16, "none") if kind == "bfloat16" else (torch.float32, "int8")
    weights = {name: tensor.bfloat16() for name, tensor in layer_weights("layer", 1, **VARIANTS[variant]).items()}
    x = random(10, HIDDEN, seed=7)
    beside = random(10, HIDDEN, seed=8) if variant == "eagle3" else None
    wanted = twin(weights, "layer", x.double(), None if beside is None else beside.double())
    taken = {name: tensor.to(dtype) for name, tensor in weights.items()}
    layers = kernels("native", dtype, how).layers(config(1), taken, ["layer"])
    got = run(layers, dtype, x, beside, [10])
    assert (got - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(got, run(layers, dtype, x, beside, [1, 2, 3, 7, 10]))


@pytest.mark.parametrize("name", ["torch", "native"])
def test_layers_can_be_run_some_at_a_time(name: str) -> None:
    weights = {}
    for i in range(8):
        weights |= layer_weights(f"layers.{i}", i, **VARIANTS["llama"])
    layers = kernels(name).layers(config(8), weights, [f"layers.{i}" for i in range(8)])
    batch = build_batch(token_rows(Row([0] * 5, 0, PAGES)), 4, CPU)
    attention = layers.create_attention(4)
    attention.plan(batch)
    cache = KVCache(layers.config, pages=6, page_size=4, dtype=torch.float32, device=CPU)
    whole = layers.forward(random(5, HIDDEN), batch, cache, attention).clone()
    parts = random(5, HIDDEN)
    for first, end in ((0, 0), (0, 1), (1, 7), (7, None)):
        parts = layers.forward(parts, batch, cache, attention, first=first, end=end)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projections_norm_each_input_and_put_them_side_by_side(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    """Also inputs that are columns of a wider tensor, as features come from the wire."""
    made = kernels(name, dtype)
    weight, bias = random(70, 224, seed=1).to(dtype), random(70, seed=2).to(dtype) if has_bias else None
    norms = [None, 1 + 0.2 * random(128, seed=3).to(dtype), None]
    wide = random(9, 300, seed=4).bfloat16()
    parts = [random(9, 64, seed=5).to(dtype), wide[:, 7:135], wide[:, 100:132].float()]
    projection = made.projection(weight, bias, norms, EPS)
    normed = [norm(part.double(), weight) for part, weight in zip(parts, norms, strict=True)]
    wanted = torch.cat(normed, -1) @ weight.double().T + (0 if bias is None else bias.double())
    for rows in (1, 9):
        got = projection(*(part[:rows] for part in parts))
        assert got.dtype is made.activations
        error = (got.double() - wanted[:rows]).norm() / wanted[:rows].norm()
        assert error < (1e-6 if dtype is torch.float32 else 0.01)


def test_eight_bit_projections_round_each_input_by_itself() -> None:
    weight, parts = random(64, 128, seed=1), [random(5, 32, seed=2), random(5, 96, seed=3)]
    norms = [random(32, seed=4), None]
    made = (kernels(name, quantize="int8") for name in ("torch", "native"))
    slow, fast = (one.projection(weight, None, norms, EPS)(*parts) for one in made)
    torch.testing.assert_close(fast, slow, atol=0.05, rtol=0)
    assert (fast - slow).abs().mean() < 1e-3


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_an_output_head_norms_and_multiplies(name: str, has_norm: bool) -> None:
    """Also when a matrix is shared with a head behind another norm."""
    made = kernels(name)
    matrix, weight = random(41, HIDDEN, seed=1), 1 + 0.2 * random(HIDDEN, seed=2) if has_norm else None
    x = random(6, HIDDEN, seed=3)
    embed, tied = made.tied(matrix, weight, EPS)
    _, shared = made.output_heads(matrix, [random(HIDDEN, seed=4), weight], EPS)
    for head in (*made.output_heads(matrix, [weight], EPS), shared, tied):
        assert head.rows == 41
        torch.testing.assert_close(head.normed(x).double(), norm(x.double(), weight), atol=1e-5, rtol=0)
        wanted = norm(x.double(), weight) @ matrix.double().T
        logits = head.logits(x)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits.double(), wanted, atol=1e-4, rtol=0)
    ids = torch.tensor([40, 0, 7, 7])
    for one in (embed, made.embedding(matrix)):
        torch.testing.assert_close(one(ids), matrix[ids], atol=0, rtol=0)


def test_kernels_are_chosen_by_every_width() -> None:
    def choose(name: str, **options: Any) -> Callable[[], Kernels]:
        return lambda: choose_kernels(name, config(1), torch.float32, CPU, **options)

    with pytest.raises(InvalidArgumentError, match=r"kernels is native.*40"):
        choose("native", inputs=(64, 40))()
    with pytest.raises(InvalidArgumentError, match=r"quantize is 'int8'.*40"):
        choose("auto", inputs=(40,), quantize="int8")()
    assert choose("torch", inputs=(40,))().activations is torch.float32
