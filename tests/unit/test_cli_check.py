"""The command ``pilotfish check``: what it says without a server, and of one that answers nonsense."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from check_answers import INFO
from fake_generation import FakeGeneration, unused_address
from typer.testing import CliRunner
from typer.testing import Result as Run

from pilotfish.bench.origin import Origin
from pilotfish.check.checks import CHECKS
from pilotfish.check.page import page
from pilotfish.check.report import Report, verdict
from pilotfish.check.results import Counts, Result, failed, passed, skipped
from pilotfish.check.setting import Setting
from pilotfish.cli.main import app


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


def test_a_run_is_what_its_worst_result_is() -> None:
    assert report(passed("a"), skipped("b", "why")).status == "passed"
    assert report(passed("a"), failed("b", "why")).status == "failed"
    assert report(skipped("b", "why")).status == "skipped"
    assert verdict(report(passed("a"))) == "1 passed, from 1,234 answers of 56,789 tokens"
