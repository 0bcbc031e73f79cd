"""The command ``pilotfish check``: what it says without a server, and of one that answers nonsense."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
from check_answers import INFO
from fake_generation import FakeGeneration, Status, Wait, finished, piece, serving, started, unused_address
from rich.console import Console
from typer.testing import CliRunner
from typer.testing import Result as Run

from pilotfish.bench.origin import Origin
from pilotfish.check.asking import Asker
from pilotfish.check.checks import CHECKS, Check
from pilotfish.check.page import page
from pilotfish.check.rehearsal import Rehearsal
from pilotfish.check.report import Report, verdict
from pilotfish.check.results import Counts, Result, failed, passed, skipped
from pilotfish.check.setting import Setting
from pilotfish.check.significance import detectable
from pilotfish.cli.check_progress import Meter
from pilotfish.cli.main import app
from pilotfish.v1 import generation_pb2 as pb


def check(*flags: str) -> Run:
    return CliRunner().invoke(app, ["check", *flags], env={"COLUMNS": "100"})


def test_the_list_names_every_check(fake: FakeGeneration, address: str) -> None:
    result = check("--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [each.name for each in CHECKS]
    assert [line.split()[0] for line in check("--list", "--only", "ends").stdout.splitlines()] == ["ends"]
    assert fake.requests == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "nonsense"],
        ["--up", "--target x"],  # beside the server of the environment
        ["--false-alarms", "0"],
        ["--seed", "-1"],
        ["--concurrency", "0"],
        ["--near-tie", "-1"],
        ["--budget", "0"],
        ["--budget", "300", "--quick"],
    ],
)
def test_bad_usage_exits_with_2_and_asks_nothing(flags: list[str], fake: FakeGeneration, address: str) -> None:
    assert check(*flags).exit_code == 2
    assert fake.requests == []


def test_an_unknown_check_is_told_which_there_are(address: str) -> None:
    assert "greedy, seeded, unseeded" in check("--only", "nonsense").stderr


def test_nobody_there_says_how_to_start_somebody() -> None:
    result = check("--server", unused_address())
    assert result.exit_code == 1
    assert "start a server with `pilotfish up`" in result.stderr


def test_a_report_that_cannot_be_written_is_told_before_anything_is_asked(
    fake: FakeGeneration, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--report is" in check("--report", str(tmp_path / "nothing" / "x.html")).stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'pilotfish[bench]'" in check("--report", str(tmp_path / "x.html")).stderr
    assert fake.requests == []


@dataclass
class Steady(FakeGeneration):
    """Answers with as many tokens as it is asked for, always the same, until a request comes that has ``top_k``."""

    then: Status | Wait | None = None
    reached: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        count = request.sampling.max_tokens
        last = finished()
        last.finished.usage.completion_tokens, last.finished.usage.accepted = count, 0
        self.script = [started(), *[piece((1, "x", "b"))] * count, last]
        if self.then is not None and (request.sampling.top_k or self.reached.is_set()):
            self.script = [started(), self.then]
            self.reached.set()
        yield from super().Generate(request, context)


TWO_OF_THREE = ["--only", "greedy", "--only", "seeded", "--only", "mixed"]
"""Only the last of them asks with ``top_k``."""


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steady]:
    fake = Steady()
    with serving(fake) as address:
        monkeypatch.setenv("PILOTFISH_SERVER", address)
        yield fake


def test_a_whole_run_says_how_long_it_takes_and_that_it_passed(steady: Steady, tmp_path: Path) -> None:
    result = check("--budget", "1", *TWO_OF_THREE, "--report", str(tmp_path / "r.html"))
    assert result.exit_code == 0
    assert "this will take about" in result.stderr
    assert re.findall(r"\] (\w+): ", result.stderr) == ["greedy", "seeded", "mixed"]
    assert "smollm" not in result.stdout
    assert "incomplete" not in (tmp_path / "r.html").read_text() + result.stdout


def test_in_a_terminal_the_bars_say_how_much_is_left(steady: Steady, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("pilotfish.cli.check_progress.stderr", screen)
    assert check("--budget", "1", *TWO_OF_THREE).exit_code == 0
    assert isinstance(screen.file, StringIO)
    said = screen.file.getvalue()
    assert "all checks" in said
    assert "mixed" in said
    assert re.search(r"about \d+ s left", said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_ends_is_incomplete(number: signal.Signals, steady: Steady, tmp_path: Path) -> None:
    """After two of three checks, of which nothing failed."""
    steady.then = Wait()
    killer = threading.Thread(target=lambda: steady.reached.wait(60) and os.kill(os.getpid(), number))
    killer.start()
    result = check("--budget", "1", *TWO_OF_THREE, "--report", str(tmp_path / "r.html"))
    killer.join()
    assert result.exit_code == 128 + number
    said = f"incomplete (stopped by {number.name}): 1 of 3 checks did not come to their end (mixed)"
    text = (tmp_path / "r.html").read_text()
    assert said in result.stdout
    assert said in text
    assert "tiny: incomplete" in text


def test_a_run_whose_server_goes_away_is_incomplete(steady: Steady, tmp_path: Path) -> None:
    steady.then = Status(grpc.StatusCode.UNAVAILABLE, "gone for good")
    result = check("--budget", "1", *TWO_OF_THREE, "--report", str(tmp_path / "r.html"))
    assert result.exit_code == 1
    assert "incomplete (the server is gone: " in result.stdout
    assert "1 of 3 checks did not come to their end (mixed)" in result.stdout
    assert "tiny: incomplete" in (tmp_path / "r.html").read_text()


def test_a_run_in_which_a_check_raises_is_incomplete_and_goes_on(
    steady: Steady, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(asker: Asker) -> AsyncIterator[Result]:
        if not isinstance(asker, Rehearsal):
            raise ValueError("a fault of ours")
        yield passed("nothing")

    module = sys.modules["pilotfish.check.checks"]
    monkeypatch.setattr(module, "CHECKS", (Check("broken", "of nothing", broken), *CHECKS))
    result = check("--budget", "1", "--only", "broken", "--only", "greedy", "--report", str(tmp_path / "r.html"))
    assert result.exit_code == 1
    assert "incomplete: 1 of 2 checks did not come to their end (broken)" in result.stdout
    assert "the check could not go on: ValueError: a fault of ours" in result.stdout
    assert "greedy" in result.stdout


def report(*results: Result) -> Report:
    origin = Origin(
        server=INFO, address="h:1", started_by="", command="pilotfish check", date="2026-01-01T00:00:00+00:00",
        machine="a machine",
    )  # fmt: skip
    return Report(
        origin=origin, setting=Setting(), about={"law": "of the law", "ends": "of ends"}, results=results,
        requests=1234, tokens=56789, seconds=7.0,
    )  # fmt: skip


TEST = Result("first <token>", "failed", p_value=1e-9, counts=Counts(("5", "others"), (9.0, 1.0), (5, 5)), check="law")
MIXED = report(
    TEST,
    Result("second token", "passed", p_value=0.5, counts=Counts(("5", "7"), (4.0, 6.0), (5, 5)), check="law"),
    Result("stop texts", "skipped", "no <stop>", check="ends"),
)


def test_the_page_has_every_result_and_stands_alone() -> None:
    text = page(MIXED)
    assert "first &lt;token&gt;" in text
    assert "no &lt;stop&gt;" in text
    assert "1 failed, 1 passed, 1 skipped, from 1,234 answers of 56,789 tokens" in text
    assert text.count("<svg") == 2 * 2  # for desks and for phones
    assert text.count("<details open>") == 1
    for outside in ("src=", "<link", "@import"):
        assert outside not in text


def test_a_page_without_tests_has_no_plots() -> None:
    assert "<svg" not in page(report(Result("a", "passed", check="ends")))


def test_a_report_without_all_its_checks_is_incomplete() -> None:
    part = replace(report(replace(passed("a"), check="law")), unfinished=("ends",), stopped="stopped by SIGTERM")
    assert part.status == "incomplete"
    assert verdict(part).startswith(
        "incomplete (stopped by SIGTERM): 1 of 2 checks did not come to their end (ends); 1"
    )
    assert replace(part, results=[failed("b", "why")]).status == "failed"
    assert replace(part, results=[]).status == "incomplete"
    assert "did not come to their end" in page(part)


def test_a_report_says_what_it_could_find() -> None:
    tests = [
        Result("a", "passed", p_value=0.5, numbers={"draws": draws, "freedom": 10.0}, check="law")
        for draws in (300.0, 3000.0)
    ]
    found = report(*tests, replace(passed("exact"), check="ends"))
    assert found.finds(tests) == pytest.approx(detectable(3000, 10, 0.001, 2))
    assert found.finds([passed("exact")]) is None
    assert f"finds {100 * detectable(3000, 10, 0.001, 2):.1f} %" in page(found)


def test_the_meter_goes_by_the_answers_that_came() -> None:
    now = 100.0
    meter = Meter(lambda: now)
    meter.began(check_s=10.0, left_s=40.0)
    now = 110.0
    assert (meter.of_check, meter.remaining_s, meter.of_run) == (0.0, 40.0, 0.2)
    meter.begin(count=4, seconds=8.0)
    for _ in range(3):
        meter.advance()
    assert meter.of_check == pytest.approx(0.6)
    assert meter.remaining_s == pytest.approx(34.0)
    for _ in range(3):  # more than was forecast
        meter.advance()
    assert (meter.of_check, meter.remaining_s) == (1.0, 30.0)
    meter.began(check_s=0.0, left_s=0.0)
    assert (meter.of_check, meter.remaining_s, meter.of_run) == (0.0, 0.0, 1.0)


def test_a_run_is_what_its_worst_result_is() -> None:
    assert report(passed("a"), skipped("b", "why")).status == "passed"
    assert report(passed("a"), failed("b", "why")).status == "failed"
    assert report(skipped("b", "why")).status == "skipped"
    assert verdict(report(passed("a"))) == "1 passed, from 1,234 answers of 56,789 tokens"
