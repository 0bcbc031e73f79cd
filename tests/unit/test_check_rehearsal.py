"""Every check can be rehearsed, with any server, and none is asked anything by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from check_answers import INFO

from pilotfish.check.asking import Asker
from pilotfish.check.checks import CHECKS, Check
from pilotfish.check.pace import Forecast, Speed
from pilotfish.check.rehearsal import Silent, forecast
from pilotfish.check.results import Result
from pilotfish.check.setting import LABORATORY, Setting
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Capabilities, DrafterCapability, FieldCapability

NAMES = [*SamplingParams.__dataclass_fields__, "json_schema", "regex", "ebnf"]
DRAFTERS = tuple(DrafterCapability(name, "model", ("match", "ratio", "block"), False, 1) for name in ("one", "other"))


def asker(*, is_able: bool = True, drafters: int = 1, laboratory: Asker | None = None) -> Asker:
    """Of a server that is nowhere."""
    fields = tuple(FieldCapability(name, "", "", is_able, "not here") for name in NAMES)
    nobody: Any = None
    info = replace(INFO, max_len=2048, vocab_size=300, draft_replica_count=drafters)
    made = Asker(nobody, info, Capabilities(fields, DRAFTERS[:drafters]), Setting(), Silent(), laboratory)
    made.speed = Speed(0.01, 0.001)
    return made


def foreseen(check: Check, of: Asker) -> tuple[Forecast, Forecast]:
    return asyncio.run(forecast(check, of))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("drafters", [0, 1, 2])
@pytest.mark.parametrize("is_able", [True, False])
def test_a_full_check_asks_more_than_the_least(check: Check, drafters: int, is_able: bool) -> None:
    least, full = foreseen(check, asker(is_able=is_able, drafters=drafters))
    assert 0 <= least.answers <= full.answers
    assert 0.0 <= least.seconds <= full.seconds
    if is_able and drafters and check.name != LABORATORY:
        assert 0 < least.seconds < full.seconds


def test_the_laboratory_counts_at_its_own_speed() -> None:
    [check] = [each for each in CHECKS if each.name == LABORATORY]
    tiny = asker()
    slow, _ = foreseen(check, asker(laboratory=tiny))
    tiny.speed = Speed(0.001, 0.0001)
    fast, _ = foreseen(check, asker(laboratory=tiny))
    assert fast.answers == slow.answers > 0
    assert fast.seconds == pytest.approx(slow.seconds / 10)


def test_a_check_that_cannot_be_rehearsed_stops_nothing() -> None:
    async def broken(asker: Asker) -> AsyncIterator[Result]:
        raise KeyError("nothing is there")
        yield

    assert foreseen(Check("broken", "", broken), asker()) == (Forecast(), Forecast())
