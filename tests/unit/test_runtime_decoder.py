"""The decoder answers what Hugging Face answers, however the tokens are cut, paged and branched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import Row, token_rows
from tiny_models import load_reference, make_tiny_model
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.paged_model import PagedModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"head_dim": 32, "num_key_value_heads": 1},
    "llama every head its own": {"num_key_value_heads": 4},
    "llama padded vocabulary": {"padded_vocab": 320},
    "llama linear": {"rope_parameters": LINEAR},
    "llama llama3": {"rope_parameters": LLAMA3},
    "mistral": {},
    "mistral theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen2 yarn": {"rope_parameters": YARN},
    "qwen2 yarn factor": {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}},
    "qwen2 yarn untruncated": {"rope_parameters": YARN | {"truncate": False}},
    "qwen2 yarn mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4}},
    "qwen3": {},
    "qwen3 biases": {"attention_bias": True},
}

PROMPT = np.random.default_rng(0).integers(4, 280, 200).tolist()
FEATURES = ("hidden.0", "hidden.1", "final")


def paged(
    folder: Path, *, pages: int = 40, page_size: int = 16, features: tuple[str, ...] = (), kernels: str = "auto"
) -> PagedModel:
    model = load_model(folder, dtype="float32", device="cpu", kernels=kernels)
    return PagedModel(model, pages=pages, page_size=page_size, features=features)


@torch.inference_mode()
def all_logits(model: PagedModel, *rows: Row, copies: Any = ()) -> Tensor:
    batch = token_rows(*rows, copies=copies)
    return model.logits(model.extend(batch), torch.arange(len(batch.token_ids)))


@torch.inference_mode()
def reference(folder: Path, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    answer = load_reference(folder)(torch.tensor([tokens]), output_hidden_states=True)
    return answer.logits[0], tuple(state[0] for state in answer.hidden_states)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states_equal_those_of_hugging_face(case: str, kernels: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", case.split()[0], **CASES[case])
    model = paged(folder, features=FEATURES, kernels=kernels)
    pages = list(range(20, 33))
    logits = all_logits(model, Row(PROMPT, 0, pages))
    wanted, states = reference(folder, PROMPT)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    slots = torch.tensor([p * 16 + o for p in pages for o in range(16)])[: len(PROMPT)]
    stored = model.cache.read_features(slots)
    torch.testing.assert_close(stored, torch.cat([states[0], states[1], states[-1]], -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_reference(dtype: str, model_folder: Callable[..., Path]) -> None:
    model = PagedModel(load_model(model_folder(), dtype=dtype, device="cpu"), pages=40)
    logits = all_logits(model, Row(PROMPT[:50], 0, range(4)))
    wanted, _ = reference(model_folder(), PROMPT[:50])
    relative = (logits - wanted).norm() / wanted.norm()
    assert relative < (0.05 if dtype == "bfloat16" else 0.01)


def test_first_layers_only_equal_the_hidden_state_after_them(model_folder: Callable[..., Path]) -> None:
    folder = model_folder(layers=3)
    model = PagedModel(load_model(folder, dtype="float32", device="cpu", layers=1), pages=8, features=("hidden.1",))
    all_logits(model, Row(PROMPT[:20], 0, [0, 1]))
    _, states = reference(folder, PROMPT[:20])
    torch.testing.assert_close(model.cache.read_features(torch.arange(20)), states[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunks_on_scattered_pages_in_mixed_batches_equal_one_pass(
    data: st.DataObject, kernels: str, model_folder: Callable[..., Path]
) -> None:
    """Three rows advance by random chunks, each step batching a random set of them."""
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    model = paged(model_folder(), pages=600 // page_size + 6, page_size=page_size, kernels=kernels)
    lengths = data.draw(st.lists(st.integers(1, 180), min_size=3, max_size=3))
    rows = [PROMPT[i : i + n] for i, n in enumerate(lengths)]
    order = data.draw(st.randoms(use_true_random=False)).sample(range(600 // page_size + 6), 600 // page_size + 6)
    tables = [[order.pop() for _ in range(-(-n // page_size))] for n in lengths]
    got: list[list[Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        open_rows = [i for i in range(len(rows)) if done[i] < lengths[i]]
        chosen = data.draw(st.lists(st.sampled_from(open_rows), min_size=1, unique=True))
        takes = [data.draw(st.integers(1, lengths[i] - done[i])) for i in chosen]
        batch = [Row(rows[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in zip(chosen, takes, strict=True)]
        for i, n, part in zip(chosen, takes, torch.split(all_logits(model, *batch), takes), strict=True):
            got[i].append(part)
            done[i] += n
    fresh = paged(model_folder(), pages=200, page_size=1)
    for tokens, parts in zip(rows, got, strict=True):
        torch.testing.assert_close(
            torch.cat(parts), all_logits(fresh, Row(tokens, 0, range(len(tokens)))), atol=1e-4, rtol=0
        )


def test_a_chunk_longer_than_a_piece_beside_short_rows_equals_one_pass(model_folder: Callable[..., Path]) -> None:
    long = np.random.default_rng(1).integers(4, 280, 500).tolist()
    model = paged(model_folder(), pages=80)
    all_logits(model, Row(long[:30], 0, range(32)), Row(PROMPT[:40], 0, range(40, 43)))
    both = all_logits(model, Row(long[30:], 30, range(32)), Row(PROMPT[40:43], 40, range(40, 43)))
    wanted, _ = reference(model_folder(), long)
    torch.testing.assert_close(both[:470], wanted[30:], atol=1e-4, rtol=0)
    short, _ = reference(model_folder(), PROMPT[:43])
    torch.testing.assert_close(both[470:], short[40:], atol=1e-4, rtol=0)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of 2 to 12 tokens; several may follow the cache directly."""
    return [-1, *(draw(st.integers(-1, i - 1)) for i in range(1, draw(st.integers(2, 12))))]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@given(parents=trees(), start=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_node_of_a_tree_sees_what_its_own_chain_would_show(
    parents: list[int], start: int, seed: int, kernels: str, model_folder: Callable[..., Path]
) -> None:
    tokens = np.random.default_rng(seed).integers(4, 280, len(parents)).tolist()
    model = paged(model_folder(), kernels=kernels)
    prefix, pages = PROMPT[:start], [7, 3, 9, 30]
    if start:
        all_logits(model, Row(prefix, 0, pages))
    tree = Row(tokens, start, pages, parents)
    logits = all_logits(model, tree, Row(PROMPT[:5], 0, [20]))
    fresh = paged(model_folder())
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = all_logits(fresh, Row(prefix + [tokens[i] for i in path], 0, pages))
        torch.testing.assert_close(logits[node], chain[-1], atol=1e-4, rtol=0)


def test_an_accepted_tree_path_moved_by_slot_copies_continues_like_the_chain(
    model_folder: Callable[..., Path],
) -> None:
    """Tree 0 -> (1, 2), 2 -> (3, 4): path 0, 2, 4 is accepted and moved to the slots after node 0."""
    model = paged(model_folder(), features=FEATURES)
    pages, start = [5, 11, 2], 14
    all_logits(model, Row(PROMPT[:start], 0, pages))
    tree = [50, 60, 70, 80, 90]
    all_logits(model, Row(tree, start, pages, [-1, 0, 0, 2, 2]))

    def slot(place: int) -> int:
        return pages[place // 16] * 16 + place % 16

    copies = [(slot(start + 2), slot(start + 1)), (slot(start + 4), slot(start + 2))]
    chain = [*PROMPT[:start], 50, 70, 90]
    after = all_logits(model, Row([100, 110], start + 3, pages), copies=copies)
    wanted, states = reference(model_folder(), [*chain, 100, 110])
    torch.testing.assert_close(after, wanted[-2:], atol=1e-4, rtol=0)
    slots = torch.tensor([slot(place) for place in range(start + 5)])
    assert model.cache.token_ids.view(-1)[slots].tolist() == [*chain, 100, 110]
    torch.testing.assert_close(
        model.cache.read_features(slots), torch.cat([states[0], states[1], states[-1]], -1), atol=1e-4, rtol=0
    )


def test_overwriting_rejected_tokens_is_all_that_rolling_back_takes(model_folder: Callable[..., Path]) -> None:
    model = paged(model_folder())
    all_logits(model, Row(PROMPT[:20], 0, [0, 1]))
    all_logits(model, Row([9, 9, 9, 9], 20, [0, 1]))
    again = all_logits(model, Row(PROMPT[20:24], 20, [0, 1]))
    wanted, _ = reference(model_folder(), PROMPT[:24])
    torch.testing.assert_close(again, wanted[20:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["hidden.3", "hidden.-1", "last", "hidden.00"])
def test_unknown_features_are_refused_by_name(name: str, model_folder: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        paged(model_folder(), features=("final", name))


def test_a_feature_named_twice_is_refused(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgumentError, match="once"):
        paged(model_folder(), features=("final", "final"))
