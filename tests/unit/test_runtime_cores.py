"""Workers lend each other the threads of those that wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.errors import OverloadedError
from pilotfish.runtime import cores
from pilotfish.runtime.cores import SharedCores


@pytest.fixture
def processes() -> Iterator[list[int]]:
    """Ids of three processes that live as long as the test."""
    code = "import sys; sys.stdin.read()"
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(3)]
    yield [child.pid for child in children]
    for child in children:
        child.communicate()


def test_idle_threads_are_shared_among_those_who_work(tmp_path: Path, processes: list[int]) -> None:
    target, one, two = (
        SharedCores(tmp_path / "cores", threads, 8, process)
        for threads, process in zip((4, 2, 2), processes, strict=True)
    )
    assert target.threads() == 8, "the drafts wait"
    with target.working(), one.working():
        assert (target.threads(), one.threads()) == (5, 3), "two work, and share what the third lends"
        with two.working():
            assert [each.threads() for each in (target, one, two)] == [4, 2, 2]
    assert one.threads() == 8


def test_never_more_threads_than_cores(tmp_path: Path, processes: list[int]) -> None:
    first, *_ = [SharedCores(tmp_path / "cores", 1, 2, process) for process in processes]
    assert first.threads() == 2


def test_a_worker_that_died_at_work_lends_for_ever_and_its_place_is_taken(tmp_path: Path, processes: list[int]) -> None:
    dying = subprocess.Popen([sys.executable, "-c", "pass"])
    first = SharedCores(tmp_path / "cores", 1, 4, processes[0])
    with SharedCores(tmp_path / "cores", 3, 4, dying.pid).working():
        dying.wait()
        assert first.threads() == 4
    again = SharedCores(tmp_path / "cores", 2, 4, processes[1])
    with again.working():
        assert first.threads() == 1


def test_too_many_workers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[int]) -> None:
    monkeypatch.setattr(cores, "_SLOTS", 1)
    SharedCores(tmp_path / "cores", 1, 2, os.getpid())
    with pytest.raises(OverloadedError, match=r"share_cores.*1 workers"):
        SharedCores(tmp_path / "cores", 1, 2, processes[0])


def test_alone_a_process_uses_what_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.torch, "get_num_threads", lambda: 7)
    with cores.working():
        assert cores.threads() == 7
