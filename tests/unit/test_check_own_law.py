"""What ``pilotfish check`` works out from log probabilities, beside the runtime that does it for real."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from check_answers import answer
from scipy import stats

from pilotfish import SamplingParams
from pilotfish.check.heeding import breaches
from pilotfish.check.law import Draw
from pilotfish.check.own_law import drawn_from, lead, sampled_from, shaped
from pilotfish.client.results import Completion, TokenLogprobs
from pilotfish.noise import Purpose
from pilotfish.runtime.sampling import draw_keys, probabilities, race
from pilotfish.steps import SamplingRows

LOGITS = np.array([2.0, 1.5, 0.5, 0.0, -1.0])
TOP = tuple(zip(range(5), np.log(np.exp(LOGITS) / np.exp(LOGITS).sum()).tolist(), strict=True))


def test_temperature_and_top_k_are_applied_once_more() -> None:
    wanted = torch.softmax(torch.tensor(LOGITS[:3]) / 0.7, -1)
    found = sampled_from(TOP, 0.7, 3)
    assert [math.exp(found[token_id]) for token_id in range(3)] == pytest.approx(wanted.tolist())
    assert sampled_from(TOP, 1.0, 0) == dict(TOP)


def test_penalties_bias_and_bans_are_sums() -> None:
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 2.0, 3: -100.0}, banned_token_ids=[4]
    )
    found = shaped(TOP, params, [0, 0, 2])
    assert found is not None
    shifts = [found[token_id] - logprob for token_id, logprob in TOP]
    assert shifts == pytest.approx([-1.0, 2.0, -0.75, -math.inf, -math.inf])
    assert shaped(TOP, SamplingParams(repetition_penalty=1.1), []) is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_winner_of_a_seeded_draw_leads(temperature: float) -> None:
    """Against the target's own race."""
    logits = torch.tensor(LOGITS)[None]
    for seed in range(40):
        keys = draw_keys(np.array([seed], np.uint64), Purpose.MATCH, np.zeros(1, np.int64), np.array([17]))
        winner = int(race(torch.softmax(logits / temperature, -1), keys)[0])
        params = SamplingParams(temperature=temperature, seed=seed)
        leads = [lead(params, dict(TOP), 17, winner, other) for other in range(5)]
        assert all(each is not None and each >= 0 for each in leads)


def test_a_lead_that_is_not_known_is_none() -> None:
    assert lead(SamplingParams(), dict(TOP), 0, 0, 1) == pytest.approx(0.5)
    assert lead(SamplingParams(), dict(TOP), 0, 0, 9) is None
    assert lead(SamplingParams(temperature=1.0), dict(TOP), 0, 0, 1) is None


def told(*token_ids: int) -> Completion:
    """Tokens that all come from the same law."""
    plain = answer([(token_id, "x", "b") for token_id in token_ids])
    [piece] = plain.pieces
    tokens = tuple(replace(token, logprobs=TokenLogprobs(dict(TOP)[token.id], TOP)) for token in piece.tokens)
    return replace(plain, pieces=(replace(piece, tokens=tokens),))


@pytest.mark.parametrize(
    ("params", "token_ids", "heeds"),
    [
        (SamplingParams(), (0, 0), True),
        (SamplingParams(), (0, 1), False),
        (SamplingParams(presence_penalty=1.0), (0, 1), True),
        (SamplingParams(presence_penalty=1.0), (0, 0), False),
        (SamplingParams(frequency_penalty=0.3), (0, 0, 1), True),
        (SamplingParams(frequency_penalty=0.3), (0, 0, 0), False),
        (SamplingParams(logit_bias={2: 5.0}), (2, 2), True),
        (SamplingParams(banned_token_ids=[0]), (0,), False),
        (SamplingParams(allowed_token_ids=[3, 4]), (3, 3), True),
        (SamplingParams(temperature=1.0, top_k=2), (1, 0), True),
        (SamplingParams(temperature=1.0, top_k=2), (2,), False),
        (SamplingParams(temperature=1.0, top_p=0.5), (1,), True),
        (SamplingParams(temperature=1.0, top_p=0.5), (2,), False),
        (SamplingParams(temperature=1.0, min_p=0.2), (2,), True),
        (SamplingParams(temperature=1.0, min_p=0.3), (2,), False),
    ],
)
def test_what_a_field_forbids_is_noticed(params: SamplingParams, token_ids: tuple[int, ...], heeds: bool) -> None:
    assert (breaches(told(*token_ids), params, near_tie=0.01) == []) is heeds


def test_surprise_has_mean_0_and_the_variance_it_says() -> None:
    law = dict(TOP[:3])
    rest = 1 - sum(map(math.exp, law.values()))
    surprises = [Draw(token_id, law, 0, frozenset(), None).surprise for token_id in (0, 1, 2, 9)]
    p = [*map(math.exp, law.values()), rest]
    values = stats.rv_discrete(values=(range(4), p))
    assert values.expect(lambda k: np.array(surprises)[np.int64(k), 0]) == pytest.approx(0, abs=1e-12)
    assert values.expect(lambda k: np.array(surprises)[np.int64(k), 0] ** 2) == pytest.approx(surprises[0][1])


HISTORY = (0, 0, 2, 5)
WIDE = np.random.default_rng(2).normal(scale=2.0, size=60)
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.8},
    {"logit_bias": {3: 2.0, 7: -4.0}, "banned_token_ids": [5]},
    {"allowed_token_ids": [1, 2, 3, 5, 8]},
    {"stop_token_ids": [2, 9], "min_tokens": 9},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_law_of_the_likeliest_tokens_is_the_runtimes(fields: dict[str, Any]) -> None:
    """Where one of them comes."""
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 9} | fields))
    logprobs = torch.log_softmax(torch.tensor(WIDE, dtype=torch.float32), -1)
    values, ids = logprobs.topk(20)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    logits = logprobs.clone()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    for token_id, count in Counter(HISTORY).items():
        logits[token_id] -= params.presence_penalty + count * params.frequency_penalty
    logits[[*params.banned_token_ids, *(params.stop_token_ids if params.min_tokens else ())]] = -torch.inf
    if params.allowed_token_ids:
        barred = [token_id for token_id in range(60) if token_id not in params.allowed_token_ids]
        logits[barred] = -torch.inf
    [wanted] = probabilities(logits[None], sampling_of(params)).double().tolist()
    known = {token_id: wanted[token_id] for token_id, _ in top if wanted[token_id] > 0}
    law = drawn_from(top, params, HISTORY)
    assert law is not None
    assert {token_id: math.exp(score) for token_id, score in law.items()} == pytest.approx(
        {token_id: p / sum(known.values()) for token_id, p in known.items()}, rel=1e-4
    )


def sampling_of(params: SamplingParams) -> SamplingRows:
    return SamplingRows(
        temperatures=np.array([params.temperature], np.float32),
        top_ks=np.array([params.top_k], np.int32),
        top_ps=np.array([params.top_p], np.float32),
        min_ps=np.array([params.min_p], np.float32),
        seeds=np.zeros(1, np.uint64),
        rounds=np.zeros(1, np.int64),
    )


def test_a_law_that_cannot_be_told_is_none() -> None:
    assert drawn_from(TOP, SamplingParams(temperature=1.0, repetition_penalty=1.1), ()) is None
    assert drawn_from(TOP, SamplingParams(temperature=0.5, top_p=0.9), ()) is None  # of all tokens, not of these
    assert drawn_from(TOP, SamplingParams(temperature=1.0, allowed_token_ids=[7]), ()) is None
    edge = math.exp(TOP[0][1])
    assert drawn_from(TOP, SamplingParams(temperature=1.0, top_p=edge), ()) is None  # rounding decides
    tied = (*TOP[:2], (7, TOP[1][1]), *TOP[2:])
    assert drawn_from(tied, SamplingParams(temperature=1.0, top_k=2), ()) is None  # both are kept
    assert drawn_from(tied, SamplingParams(temperature=1.0, top_k=3), ()) is not None
