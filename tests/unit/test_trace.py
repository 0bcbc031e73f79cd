"""The trace file, and where it puts what a worker did."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import Row, greedy_rows, ints, token_rows

from orchestrator.core.scheduler import Limits, Scheduler
from orchestrator.trace import NO_TRACE, ChromeTrace, _computing, _Worker
from orchestrator.usage import RoundTimes
from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import DraftResult, DraftStep, TargetResult, TargetStep


def target_step(*rows: tuple[int, int]) -> TargetStep:
    """Rows of (tokens, outputs); the outputs are a row's last tokens."""
    ends = np.cumsum([tokens for tokens, _ in rows])
    nodes = [end - back - 1 for end, (_, outputs) in zip(ends, rows, strict=True) for back in reversed(range(outputs))]
    batch = token_rows(*(Row([1] * tokens, 0, [0]) for tokens, _ in rows))
    return TargetStep(7, batch, greedy_rows(len(rows)), ints(*nodes), np.ones(len(rows), np.uint8))


def draft_step(*lengths: int) -> DraftStep:
    batch = token_rows(*(Row([1, 2], 0, [0]) for _ in lengths))
    kinds = np.ones(len(lengths), np.uint8)
    return DraftStep(8, batch, greedy_rows(len(lengths)), ints(*lengths), kinds, support_limit=4)


def target_result(compute_us: int) -> TargetResult:
    empty = np.zeros(0, np.float32)
    return TargetResult(7, ints(), empty, empty, compute_us)


def events(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def slices(path: Path, process: int) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X" and event["pid"] == process]


def test_a_step_lies_in_the_middle_of_its_round_trip() -> None:
    worker = _Worker(process=2)
    assert _computing(worker, 0.006, 1.0, 1.010) == pytest.approx((1.002, 1.008))
    assert worker.hop == pytest.approx(0.002)
    assert _computing(worker, 0.006, 2.0, 2.008) == pytest.approx((2.001, 2.007))
    assert worker.hop == pytest.approx(0.001)


def test_a_step_that_waited_ends_a_hop_before_its_answer() -> None:
    worker = _Worker(process=2)
    _computing(worker, 0.006, 1.0, 1.010)
    assert _computing(worker, 0.005, 1.001, 1.020) == pytest.approx(
        (1.013, 1.018)
    )  # not from 1.008 on: it was read late
    assert worker.hop == pytest.approx(0.002)


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.05), st.floats(0, 0.05)), min_size=1, max_size=20))
def test_a_worker_does_one_thing_at_a_time_and_nothing_before_it_is_asked(
    steps: list[tuple[float, float, float]],
) -> None:
    worker, sent, arrived, done = _Worker(process=2), 0.0, 0.0, 0.0
    for wait, compute, hops in steps:
        sent += wait
        arrived = max(arrived, sent) + compute + hops
        begin, end = _computing(worker, compute, sent, arrived)
        assert sent <= begin <= end <= arrived + 1e-9
        assert begin >= done - 1e-9
        assert end - begin <= compute + 1e-9
        done = end


def test_the_file_is_whole_json_once_closed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = ChromeTrace(path)
    answered = trace.worker("target", "h:1")
    now = time.perf_counter()
    answered(target_step((5, 5), (1, 1)), target_result(4000), now, now + 0.006)
    with trace.span("emit"):
        pass
    trace.read(now, now + 0.002, 300)
    trace.round(now, now + 0.01, 2, RoundTimes(1, 2, 3, 4, 5, 6))
    trace.close()
    found = events(path)
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {1: "orchestrator", 2: "target h:1"}
    assert [event["name"] for event in slices(path, 1)] == ["emit", "round"]
    assert slices(path, 1)[1]["args"] == {
        "rows": 2, "target_us": 1, "draft_us": 2, "hops_us": 3, "orchestrator_us": 4,
        "feature_read_us": 5, "feature_bytes": 6,
    }  # fmt: skip
    (computing,) = slices(path, 2)
    read = [event for event in found if event["name"] == "read features"]
    assert [(event["ph"], event["pid"], event["id"]) for event in read] == [("b", 1, 1), ("e", 1, 1)]
    assert read[0]["args"] == {"slots": 300}
    assert read[1]["ts"] - read[0]["ts"] == pytest.approx(2000, abs=0.2)
    under_way = [event for event in found if event["name"] == "under way"]
    assert [event["ph"] for event in under_way] == ["b", "e"]
    assert computing["dur"] == pytest.approx(4000, abs=0.2)
    assert computing["ts"] - under_way[0]["ts"] == pytest.approx(1000, abs=0.2)
    assert under_way[1]["ts"] - under_way[0]["ts"] == pytest.approx(6000, abs=0.2)


@pytest.mark.parametrize(
    ("step", "name", "numbers"),
    [
        (target_step((5, 5), (9, 1)), "verify", {"rows": 2, "tokens": 14, "prompt tokens": 8}),
        (target_step((1, 1), (1, 1)), "decode", {"rows": 2, "tokens": 2, "prompt tokens": 0}),
        (target_step((9, 0)), "prefill", {"rows": 1, "tokens": 9, "prompt tokens": 9}),
        (target_step((9, 1)), "prefill", {"rows": 1, "tokens": 9, "prompt tokens": 8}),
        (draft_step(0, 4), "propose", {"rows": 2, "tokens": 4, "longest draft": 4}),
        (draft_step(0), "catch up", {"rows": 1, "tokens": 2, "longest draft": 0}),
        (
            replace(draft_step(0), features=np.zeros((2, 9), np.uint16)),
            "catch up",
            {"rows": 1, "tokens": 2, "longest draft": 0, "feature bytes": 36},
        ),
    ],
)
def test_steps_are_named_by_what_they_do(
    step: TargetStep | DraftStep, name: str, numbers: dict[str, int], tmp_path: Path
) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    result = target_result(1) if isinstance(step, TargetStep) else DraftResult(8, ints(), ints(), 1)
    trace.worker("worker", "h:1")(step, result, time.perf_counter(), time.perf_counter())
    trace.close()
    (computing,) = slices(tmp_path / "t.json", 2)
    assert (computing["name"], computing["args"]) == (name, numbers)


def test_a_worker_that_comes_back_is_the_same_process(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "t.json")
    for address in ("h:1", "h:2", "h:1"):
        trace.worker("draft", address)
    trace.close()
    names = [event["args"]["name"] for event in events(tmp_path / "t.json") if event["name"] == "process_name"]
    assert names == ["orchestrator", "draft h:1", "draft h:2"]


def test_a_scheduler_is_watched_and_does_the_same(tmp_path: Path) -> None:
    trace, scheduler = ChromeTrace(tmp_path / "t.json"), Scheduler(Limits())
    trace.watch(scheduler)
    batch: Any = SimpleNamespace(rows=(), prompt_tokens=0)
    assert scheduler.plan_catch_up(batch) == Scheduler(Limits()).plan_catch_up(batch) == {}
    trace.close()
    assert [event["name"] for event in slices(tmp_path / "t.json", 1)] == ["plan catch up"]


def test_a_full_trace_says_so_once_and_stays_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = ChromeTrace(tmp_path / "t.json", max_events=6)
    for _ in range(5):
        with trace.span("x"):
            pass
    trace.close()
    assert len(events(tmp_path / "t.json")) == 6
    assert [record.message for record in caplog.records] == ["the trace is full; what comes now is not traced"]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="which cannot be written"):
        ChromeTrace(tmp_path / "nothing" / "t.json")


def test_without_a_trace_nothing_is_touched() -> None:
    scheduler = Scheduler(Limits())
    NO_TRACE.watch(scheduler)
    assert "plan_proposals" not in vars(scheduler)
    assert NO_TRACE.worker("target", "h:1") is None
    with NO_TRACE.span("x"):
        pass
    NO_TRACE.close()
