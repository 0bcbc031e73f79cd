"""p is Hugging Face's, draws are exponential races, and sparse answers are p's own numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import greedy_rows, sampling_rows
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pilotfish import noise
from pilotfish.errors import InternalError
from pilotfish.noise import Purpose
from pilotfish.runtime import sampling
from pilotfish.steps import SamplingRows, Supports

VOCAB = 50


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def stack(rows: list[SamplingRows]) -> SamplingRows:
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "rounds")
    return SamplingRows(**{name: np.concatenate([getattr(row, name) for row in rows]) for name in names})


def hugging_face(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    history: Any = torch.zeros(1, 0, dtype=torch.long)
    scores: Any = logits.unsqueeze(0).clone()
    return warpers(history, scores).softmax(-1)[0]


settings_of_a_row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB, 1000]),
        "top_p": st.sampled_from([1e-9, 0.01, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    }
)


@given(st.lists(settings_of_a_row, min_size=1, max_size=5), st.integers(0, 1000))
@settings(deadline=None)
def test_each_row_of_a_batch_has_the_law_that_hugging_face_gives_it(rows: list[dict[str, Any]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    p = sampling.probabilities(logits, stack([sampling_rows(1, **row) for row in rows]))
    wanted = torch.stack([hugging_face(line, **row) for line, row in zip(logits, rows, strict=True)])
    torch.testing.assert_close(p, wanted, atol=1e-6, rtol=1e-4)
    assert torch.equal(p > 0, wanted > 0)


def test_tokens_tied_with_the_kth_are_kept_as_hugging_face_keeps_them() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    p = sampling.probabilities(logits, sampling_rows(1, top_k=2))
    torch.testing.assert_close(p[0], hugging_face(logits[0], 1.0, 2, 1.0, 0.0))
    assert (p[0] > 0).tolist() == [False, True, True, True, False]


def test_temperature_zero_is_the_lowest_of_the_likeliest_ids() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    assert sampling.probabilities(logits, greedy_rows(2)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    keys = np.array([1, 2], np.int64)
    assert sampling.draw_plain(logits, greedy_rows(2), keys).token_ids.tolist() == [1, 0]


def test_any_temperature_gives_a_law() -> None:
    logits = torch.cat([random_logits(1, scale=1e4), random_logits(1, scale=1e-4)])
    for temperature in (1e-45, 1e-30, 1e30):
        p = sampling.probabilities(logits, sampling_rows(2, temperature=temperature))
        torch.testing.assert_close(p.sum(-1), torch.ones(2))


def test_greedy_and_sampled_rows_do_not_disturb_each_other() -> None:
    logits, keys = random_logits(4), np.arange(4, dtype=np.int64)
    mixed = stack([greedy_rows(1), sampling_rows(1, seed=5), greedy_rows(1), sampling_rows(1, temperature=0.5, seed=9)])
    together = sampling.draw_plain(logits, mixed, keys)
    for i in range(4):
        alone = sampling.draw_plain(logits[i : i + 1], sampling.take_rows(mixed, np.array([i])), keys[i : i + 1])
        assert together.token_ids[i] == alone.token_ids[0]
    assert together.token_ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def slow_race(weights: Tensor, key: int, token_ids: list[int]) -> int:
    times = []
    for weight, token in zip(weights.tolist(), token_ids, strict=True):
        u = float(noise.uniform(np.array([key]), np.array([token]))[0])
        times.append(-math.log(u) / weight if weight > 0 else math.inf)
    return times.index(min(times))


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 5000))
@settings(max_examples=30, deadline=None)
def test_races_equal_a_loop_over_tokens(seed: int, round_index: int, position: int) -> None:
    p = sampling.probabilities(random_logits(1, seed=position), sampling_rows(1, top_k=20))
    keys = sampling.draw_keys(
        np.array([seed], np.uint64), Purpose.OUTSIDE, np.array([round_index]), np.array([position])
    )
    assert keys.tolist() == [noise.key(seed, Purpose.OUTSIDE, round_index, position)]
    assert int(sampling.race(p, keys)[0]) == slow_race(p[0], int(keys[0]), list(range(VOCAB)))


def test_races_are_keyed_by_token_id_and_not_by_place() -> None:
    p, keys = random_logits(1).softmax(-1), np.array([77], np.int64)
    winner = int(sampling.race(p, keys)[0])
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).unsqueeze(0)
    place = int(sampling.race(p.gather(-1, order), keys, order)[0])
    assert int(order[0, place]) == winner


def test_draws_follow_p() -> None:
    """Chi-square over 20,000 seeds."""
    n = 20_000
    logits = random_logits(1, vocab=12, scale=1.5).expand(n, -1)
    rows = sampling_rows(n, temperature=0.8, top_p=0.95)
    keys = sampling.draw_keys(rows.seeds, Purpose.MATCH, rows.rounds, np.full(n, 9))
    counts = np.bincount(sampling.draw_plain(logits, rows, keys).token_ids, minlength=12)
    p = sampling.probabilities(logits[:1], sampling_rows(1, temperature=0.8, top_p=0.95))[0].double().numpy()
    assert counts[p == 0].sum() == 0
    assert chisquare(counts[p > 0], p[p > 0] / p.sum() * n).pvalue > 1e-3


@st.composite
def supports(draw: st.DrawFn) -> list[list[int]]:
    ids = st.lists(st.integers(0, VOCAB - 1), unique=True, max_size=12)
    return draw(st.lists(ids, min_size=1, max_size=5))


@given(supports(), st.integers(0, 100), st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([0, 3]))
@settings(max_examples=60, deadline=None)
def test_outside_draws_equal_a_loop_over_outputs(
    groups: list[list[int]], seed: int, temperature: float, top_k: int
) -> None:
    rows = sampling_rows(len(groups), temperature=temperature, top_k=top_k, seed=seed)
    p = sampling.probabilities(random_logits(len(groups), seed), rows)
    keys = sampling.draw_keys(rows.seeds, Purpose.OUTSIDE, rows.rounds, np.arange(len(groups)))
    flat = np.array([i for group in groups for i in group], np.int32)
    given_supports = Supports(np.array([len(group) for group in groups], np.int32), flat)
    draws = sampling.draw_outside(p, keys, given_supports)
    probs = iter(draws.support_probs.tolist())
    for i, group in enumerate(groups):
        wide = p[i].double()
        total = float(wide.sum())
        mine = [next(probs) for _ in group]
        assert mine == pytest.approx([float(wide[v]) / total for v in group], rel=1e-6)
        rest = p[i].clone()
        rest[group] = 0
        tail = float(rest.double().sum()) / total
        assert draws.tail_masses[i] == pytest.approx(tail, rel=1e-6)
        assert sum(mine) + float(draws.tail_masses[i]) == pytest.approx(1, abs=1e-6)
        wanted = slow_race(rest, int(keys[i]), list(range(VOCAB))) if tail else -1
        assert draws.token_ids[i] == wanted


def test_a_support_that_holds_all_of_p_leaves_no_outside_token() -> None:
    p = sampling.probabilities(random_logits(2), sampling_rows(2, top_k=2))
    ids = np.array(p[0].nonzero().flatten().tolist(), np.int32)
    draws = sampling.draw_outside(p, np.array([1, 2], np.int64), Supports(np.array([2, 0], np.int32), ids))
    assert (draws.token_ids[0], draws.tail_masses[0]) == (-1, 0)
    assert draws.tail_masses[1] == 1
    assert draws.token_ids[1] >= 0


def test_no_supports_at_all_is_a_plain_draw() -> None:
    logits, rows, keys = random_logits(3), sampling_rows(3), np.array([4, 5, 6], np.int64)
    plain = sampling.draw_plain(logits, rows, keys)
    outside = sampling.draw_outside(sampling.probabilities(logits, rows), keys, Supports())
    assert plain.token_ids.tolist() == outside.token_ids.tolist()
    assert plain.tail_masses.tolist() == outside.tail_masses.tolist() == [1, 1, 1]


@given(st.integers(1, 60), st.integers(0, 50), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_a_truncated_q_is_the_likeliest_tokens_renormalised(limit: int, seed: int, temperature: float) -> None:
    p = sampling.probabilities(random_logits(2, seed), sampling_rows(2, temperature=temperature, top_k=30))
    ids, q = sampling.truncate(p, limit)
    for row in range(2):
        best = sorted(range(VOCAB), key=lambda v: -float(p[row, v]))[: min(limit, VOCAB)]
        mass = sum(float(p[row, v]) for v in best)
        kept = {int(i): float(w) for i, w in zip(ids[row], q[row], strict=True) if w > 0}
        assert kept == pytest.approx({v: float(p[row, v]) / mass for v in best if p[row, v] > 0}, rel=1e-6)
        assert math.fsum(q[row].tolist()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_reported(value: float) -> None:
    logits = random_logits(2)
    sampling.require_finite(logits, "the target model")
    sampling.require_finite(logits[:0], "the target model")
    logits[1, 3] = value
    with pytest.raises(InternalError, match="the target model answered logits that are not finite"):
        sampling.require_finite(logits, "the target model")


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
)
def test_noise_has_the_same_bits_in_numpy_and_torch(keys: list[int], tokens: list[int]) -> None:
    ours = noise.uniform(np.array(keys)[:, None], np.array(tokens)[None])
    theirs = noise.uniform(torch.tensor(keys)[:, None], torch.tensor(tokens)[None])
    assert theirs.dtype is torch.float64
    assert (theirs.numpy() == ours).all()
    assert ((ours > 0) & (ours < 1)).all()


@pytest.mark.parametrize("vocab", [7, 256, 512, 513, 767, 1030])
def test_the_likeliest_is_the_first_of_the_largest(vocab: int) -> None:
    """Many equal ones, everywhere: in one block, in several, and behind the last whole one."""
    generator = torch.Generator().manual_seed(vocab)
    for largest in (2, 3, 40, 10_000):
        scores = torch.randint(0, largest, (50, vocab), generator=generator).float()
        wanted = [row.index(max(row)) for row in scores.tolist()]
        assert sampling.likeliest(scores).tolist() == wanted
        assert sampling.likeliest(scores[:, : vocab - 1]).tolist() == [r.index(max(r)) for r in scores[:, :-1].tolist()]
    assert sampling.likeliest(scores[:0]).tolist() == []
