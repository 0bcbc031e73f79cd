"""Numbers from passes, against slow and obvious twins."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from bench_passes import Round, completion, failed, one_pass, record, setting
from hypothesis import given
from hypothesis import strategies as st

from pilotfish import RoundTimes
from pilotfish.bench.records import Load, Record
from pilotfish.bench.summary import Result, Spread, expected_tokens, inter_token, pauses, summarize

CHAINS = st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=20)
"""Of each round, whether each draft token would be kept if it were reached."""


def round_of(chain: list[bool]) -> Round:
    return next((depth for depth, kept in enumerate(chain) if not kept), len(chain)), len(chain)


def result_of(rounds: list[Round]) -> Result:
    (result,) = summarize([(setting(4), one_pass(record(completion(rounds))))])
    return result


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_percentiles_interpolate_between_the_sorted_values(seconds: list[float]) -> None:
    def twin(percent: float) -> float:
        ordered, place = sorted(seconds), percent / 100 * (len(seconds) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        return 1e3 * (below + (above - below) * (place - math.floor(place)))

    spread = Spread.of(seconds)
    assert spread is not None
    assert (spread.median, spread.p90, spread.p99) == pytest.approx((twin(50), twin(90), twin(99)), abs=2e-3)
    assert spread.percentiles == pytest.approx([twin(percent) for percent in range(101)], abs=2e-3)
    assert Spread.of([]) is None


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 8)), min_size=1, max_size=20))
def test_tokens_of_a_piece_share_the_wait_for_it(pieces: list[tuple[float, int]]) -> None:
    at, arrivals = 0.0, []
    for gap, tokens in pieces:
        at += gap
        arrivals.append((at, tokens))
    # The twin gives every token a moment of its own, evenly spaced up to its piece's.
    moments = [arrivals[0][0]]
    for (before, _), (now, tokens) in pairwise(arrivals):
        moments += [before + (now - before) * (index + 1) / tokens for index in range(tokens)]
    one = Record(0.0, tuple(arrivals), at)
    differences = [after - before for before, after in pairwise(moments)]
    assert inter_token(one) == pytest.approx(differences)
    assert pauses(one) == pytest.approx([gap for gap, _ in pieces[1:]])
    assert sum(inter_token(one)) == pytest.approx(sum(pauses(one)))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_expected_tokens_is_the_closed_form(rate: float, length: int) -> None:
    assert expected_tokens(rate, length) == pytest.approx((1 - rate ** (length + 1)) / (1 - rate))
    assert expected_tokens(1.0, length) == length + 1


@given(CHAINS)
def test_acceptance_counts_what_was_reached(chains: list[list[bool]]) -> None:
    reached: list[list[bool]] = [[] for _ in range(6)]
    for chain in chains:
        for depth, kept in enumerate(chain):
            reached[depth].append(kept)
            if not kept:
                break
    judged = [kept for position in reached for kept in position]
    result = result_of([round_of(chain) for chain in chains])
    assert result.judged_per_position == tuple(len(position) for position in reached if position)
    assert result.kept_per_position == tuple(sum(position) for position in reached if position)
    assert result.acceptance_rate == (sum(judged) / len(judged) if judged else None)


@given(CHAINS)
def test_the_prediction_is_the_mean_over_rounds_of_their_own_k(chains: list[list[bool]]) -> None:
    result = result_of([round_of(chain) for chain in chains])
    rate = result.acceptance_rate
    if rate is None:
        assert result.predicted_tokens_per_round is None
    else:
        expected = [sum(rate**i for i in range(len(chain) + 1)) for chain in chains]
        assert result.predicted_tokens_per_round == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_independent_drafts_bring_what_is_predicted(rate: float) -> None:
    rng = random.Random(1)
    result = result_of([round_of([rng.random() < rate for _ in range(4)]) for _ in range(20_000)])
    assert result.acceptance_rate == pytest.approx(rate, abs=0.01)
    assert result.predicted_tokens_per_round == pytest.approx(result.tokens_per_round, rel=0.01)


def test_a_text_that_ends_on_an_accepted_token_counts_no_failure() -> None:
    done = completion([(2, 2)])
    last = done.pieces[-1]
    cut = (*done.pieces[:-1], type(last)(last.tokens[:2], 2, last.times))
    (result,) = summarize([(setting(4), one_pass(record(type(done)(**{**vars(done), "pieces": cut}))))])
    assert (result.acceptance_rate, result.judged_per_position) == (1.0, (1, 1))


def test_rates_are_medians_over_passes_and_speed_ups_over_pairs() -> None:
    on, off = completion([(1, 1)] * 4), completion([(0, 0)] * 8)  # 9 tokens each
    times = {0: (2.0, 6.0, 3.0), 4: (1.0, 2.0, 3.0)}
    measured = [
        (setting(length), one_pass(record(off if length == 0 else on), duration_s=times[length][repeat]))
        for repeat in range(3)
        for length in ((0, 4), (4, 0))[repeat % 2]
    ]
    without, speculative = summarize(measured)
    assert (without.setting.draft_length, speculative.setting.draft_length) == (0, 4)
    assert without.tokens_per_s == pytest.approx(3.0)  # of 4.5, 1.5 and 3
    assert speculative.tokens_per_s == pytest.approx(4.5)  # of 9, 4.5 and 3
    assert speculative.pass_speed_ups == pytest.approx((2.0, 3.0, 1.0))
    assert speculative.speed_up == pytest.approx(2.0)
    assert without.speed_up == 1.0


def test_in_an_open_loop_speed_is_a_request_s_own() -> None:
    load, off, on = Load(rate=1.0), completion([(0, 0)] * 8), completion([(1, 1)] * 4)
    # Arrivals make both passes last 10 s; a request takes 0.5 + 8 × 0.1 or 0.5 + 4 × 0.1 s.
    measured = [
        (setting(length, load), one_pass(record(done), record(done, began_at=9.0), duration_s=10.0))
        for length, done in ((0, off), (4, on))
    ]
    without, speculative = summarize(measured)
    assert speculative.tokens_per_s == without.tokens_per_s == pytest.approx(1.8)
    assert speculative.speed_up == pytest.approx(1.3 / 0.9)


def test_a_round_s_parts_and_who_waits() -> None:
    short, long = RoundTimes(4000, 2000, 1000, 1000), RoundTimes(8000, 10000, 1000, 1000)
    records = [record(completion([(1, 1)], times)) for times in (short, short, long)]
    (result,) = summarize([(setting(1), one_pass(*records))])
    split = result.median_round
    assert split is not None
    assert (split.target, split.draft, split.hops, split.orchestrator, split.total) == (4, 2, 1, 1, 8)
    assert result.target_idle == pytest.approx(1 - 16 / 36)
    assert result.draft_idle == pytest.approx(1 - 14 / 36)
    (off,) = summarize([(setting(0), one_pass(record(completion([(0, 0)], RoundTimes(4, 0, 1, 1)))))])
    assert off.draft_idle is None


def test_texts_are_compared_request_by_request() -> None:
    same, other = completion([(0, 0)] * 3), completion([(1, 1)] * 2)
    off = one_pass(record(same), record(same), failed("x"))
    on = one_pass(record(same), record(other), record(same))
    without, greedy = summarize([(setting(0), off), (setting(4), on)])
    assert (without.same_texts, without.compared_texts) == (None, 0)
    assert (greedy.same_texts, greedy.compared_texts) == (1, 2)
    _, sampled = summarize([(setting(0, temperature=1.0), off), (setting(4, temperature=1.0), on)])
    assert (sampled.same_texts, sampled.compared_texts) == (None, 0)


def test_failures_are_counted_and_named() -> None:
    measured = [
        (setting(0), one_pass(failed("the queue is full"), record(completion([(0, 0)])))),
        (setting(4), one_pass(failed("the queue is full"), failed("gone"))),
        (setting(4), one_pass(failed("gone"), failed("gone"))),
    ]
    without, speculative = summarize(measured)
    assert (without.requests, dict(without.failures)) == (2, {"the queue is full": 1})
    assert without.tokens_per_s == pytest.approx(1.0)
    assert (speculative.requests, dict(speculative.failures)) == (4, {"the queue is full": 1, "gone": 3})
    assert (speculative.tokens_per_s, speculative.speed_up, speculative.first_token) == (None, None, None)


def test_latencies_begin_when_a_request_does() -> None:
    (result,) = summarize([(setting(0), one_pass(record(completion([(0, 0)] * 2), began_at=3.0)))])
    for spread, milliseconds in ((result.first_token, 500), (result.whole, 700), (result.inter_token, 100)):
        assert spread is not None
        assert spread.median == pytest.approx(milliseconds)
