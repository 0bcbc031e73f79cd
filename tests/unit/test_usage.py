"""Usage counts what reached the client, and nothing after the end of a text."""

from __future__ import annotations

import numpy as np

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason
from orchestrator.core.requests import Params, Request
from orchestrator.core.rounds import Run
from orchestrator.usage import RoundTimes, UsageMeter

A, R, B = TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS
REQUEST = Request("r", np.array([1, 2, 3], np.int32), Params(max_tokens=50))


def run(kinds: tuple[TokenKind, ...], drafted: int, reason: FinishReason | None = None, is_round: bool = True) -> Run:
    return Run(REQUEST, tuple(range(len(kinds))), kinds, drafted, is_round, reason)


def test_rounds_positions_and_times_add_up() -> None:
    meter = UsageMeter(arrived_at=10.0)
    meter.scheduled_at = 10.5
    assert meter.add(run((B,), 0, is_round=False), 1, RoundTimes(9, 9, 9, 9), now=11.0) == 0
    assert meter.add(run((A, A, A, B), 3), 4, RoundTimes(10, 1, 5, 2), now=12.0) == 3
    assert meter.add(run((A, R), 3), 2, RoundTimes(20, 2, 1, 4), now=13.0) == 3
    assert meter.add(run((B,), 0), 1, RoundTimes(40, 0, 1, 6), now=14.0) == 0
    usage = meter.usage(REQUEST, now=15.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.rounds) == (3, 8, 3)
    assert (usage.drafted, usage.accepted) == (6, 4)
    assert usage.accepted_per_position == (2, 1, 1)
    assert usage.drafted_per_position == (2, 2, 2)
    assert (usage.queue_us, usage.first_token_us, usage.total_us) == (500_000, 1_000_000, 5_000_000)
    assert usage.round_total == RoundTimes(70, 3, 7, 12)
    assert usage.round_median == RoundTimes(20, 1, 1, 4)


def test_positions_that_were_never_kept_count_as_zero() -> None:
    meter = UsageMeter(0.0)
    meter.add(run((R,), 4), 1, RoundTimes(), 0.0)
    assert meter.usage(REQUEST, 0.0).accepted_per_position == (0, 0, 0, 0)


def test_an_end_token_inside_the_run_hides_the_drafts_behind_it() -> None:
    meter = UsageMeter(0.0)
    # Four were drafted; the second was the end token. The scheduler has cut the run already.
    assert meter.add(run((A, A), 4, FinishReason.STOP), 2, RoundTimes(), 0.0) == 2
    usage = meter.usage(REQUEST, 0.0)
    assert (usage.drafted, usage.accepted, usage.completion_tokens) == (2, 2, 2)


def test_a_stop_text_inside_the_run_hides_the_tokens_behind_it() -> None:
    meter = UsageMeter(0.0)
    # All four were accepted, but the text ended with the third.
    assert meter.add(run((A, A, A, A, B), 4), 3, RoundTimes(), 0.0) == 3
    usage = meter.usage(REQUEST, 0.0)
    assert (usage.drafted, usage.accepted, usage.completion_tokens) == (3, 3, 3)
    assert usage.accepted_per_position == (1, 1, 1)
