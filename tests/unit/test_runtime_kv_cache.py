"""Slots keep K, V, token and feature together, and copies happen as if one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache, KVSlots

PAGES, PAGE_SIZE, WIDTH = 3, 4, 5
SLOTS = PAGES * PAGE_SIZE


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def cache(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> KVCache:
    """A cache whose every slot holds something of its own."""
    config = ModelConfig.from_folder(model_folder())
    cache = KVCache(
        config,
        pages=PAGES,
        page_size=PAGE_SIZE,
        dtype=request.param,
        device=torch.device("cpu"),
        feature_width=WIDTH,
    )
    slots = KVSlots(torch.arange(SLOTS), PAGE_SIZE)
    for layer in range(config.layers):
        k = torch.randn(SLOTS, config.kv_heads, config.head_dim).to(request.param)
        cache.write(layer, slots, k, k + 1)
    cache.write_tokens(slots, torch.arange(100, 100 + SLOTS))
    cache.write_features(slots, torch.randn(SLOTS, WIDTH).to(request.param))
    return cache


def test_a_fresh_cache_is_zero_and_laid_out_as_nhd(model_folder: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(model_folder())
    cache = KVCache(config, pages=2, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 2, 4, config.kv_heads, config.head_dim)] * 2
    assert all(not layer.any() for layer in cache.layers)
    assert cache.features is None


def test_k_and_v_land_in_their_halves_of_the_page(cache: KVCache) -> None:
    k, v = torch.full((2, 2, 16), 7.0), torch.full((2, 2, 16), 8.0)
    before = cache.layers[0].clone()
    dtype = before.dtype
    cache.write(1, KVSlots(torch.tensor([6, 3]), PAGE_SIZE), k.to(dtype), v.to(dtype))
    for page, offset in ((1, 2), (0, 3)):
        assert bool((cache.layers[1][page, 0, offset] == 7).all())
        assert bool((cache.layers[1][page, 1, offset] == 8).all())
    assert torch.equal(cache.layers[0], before)


@given(pairs=st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=12))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_copies_equal_copying_one_pair_after_the_other(pairs: list[tuple[int, int]], cache: KVCache) -> None:
    assert cache.features is not None
    layers = [layer.clone() for layer in cache.layers]
    tokens, features = cache.token_ids.clone(), cache.features.clone()
    for source, target in pairs:
        (a, i), (b, j) = divmod(source, PAGE_SIZE), divmod(target, PAGE_SIZE)
        for layer in layers:
            layer[b, :, j] = layer[a, :, i].clone()
        tokens[b, j] = tokens[a, i].clone()
        features[b, j] = features[a, i].clone()
    cache.copy_slots(pairs)
    assert all(torch.equal(x, y) for x, y in zip(cache.layers, layers, strict=True))
    assert torch.equal(cache.token_ids, tokens)
    assert torch.equal(cache.features, features)


def test_features_are_read_in_the_order_asked_for(cache: KVCache) -> None:
    assert cache.features is not None
    flat = cache.features.view(SLOTS, WIDTH)
    assert torch.equal(cache.read_features(torch.tensor([5, 0, 5])), flat[[5, 0, 5]])
