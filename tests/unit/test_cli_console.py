"""What is shown while something takes long: bars in a terminal, lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from pilotfish.cli import console


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=request.param, width=100, color_system=None, highlight=False)
    monkeypatch.setattr(console, "stderr", terminal)
    return out


def test_a_file_gets_a_line_for_each_thing(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    if console.stderr.is_terminal:
        pytest.skip("of the file")
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.waiting() as report:
        report("converting")
        for done in (1, 2):
            report("converting", done, 3)
        for now[0], done in ((101.0, 1), (106.0, 2_000_000), (108.0, 3_000_000), (112.0, 4_000_000)):
            report("fetching", done, 5_000_000, is_bytes=True)
    assert shown.getvalue().splitlines() == [
        "converting",
        "fetching: 2.0 MB of 5.0 MB",
        "fetching: 4.0 MB of 5.0 MB",
    ]


def test_a_terminal_gets_a_bar_for_what_can_be_counted(shown: io.StringIO) -> None:
    if not console.stderr.is_terminal:
        pytest.skip("of the terminal")
    with console.waiting() as report:
        report("starting")
        report("target: reading weights", 1_500_000, 6_000_000, is_bytes=True)
        report("draft: reading weights", 3_000_000, 4_000_000, is_bytes=True)
        report("target: reading weights", 3_000_000, 6_000_000, is_bytes=True)
        bars = report._progress  # type: ignore[attr-defined]
        bars.refresh()
        tasks = {task.description: (task.completed, task.total) for task in bars.tasks}
        report("starting the next")
        left = [task.description for task in bars.tasks]
    reading = {"target: reading weights": (3_000_000, 6_000_000), "draft: reading weights": (3_000_000, 4_000_000)}
    assert tasks == {"starting": (0, None)} | reading
    assert left == [*reading, "starting the next"]  # the spinner is over once the next thing begins; bars stay
    last = shown.getvalue().rpartition("target: reading")[2]
    assert "3.0 MB of 6.0 MB" in last
    assert "3.0 MB of 4.0 MB" in last
