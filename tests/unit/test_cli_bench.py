"""``pilotfish bench`` against a scripted server: what it asks, what it prints and writes, how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_generation
import grpc
import pytest
from fake_generation import FakeGeneration, Status, Wait, answer, serving, started, unused_address
from typer.testing import CliRunner, Result

from pilotfish.cli.main import app
from pilotfish.v1 import generation_pb2 as pb


def bench(*flags: str) -> Result:
    return CliRunner().invoke(app, ["bench", *flags], env={"COLUMNS": "80"})


def draft_lengths(requests: list[pb.GenerateRequest]) -> list[int | None]:
    sent = [request.sampling for request in requests]
    return [sampling.draft_length if sampling.HasField("draft_length") else None for sampling in sent]


def test_it_asks_with_and_without_speculation_in_turns(fake: FakeGeneration, address: str) -> None:
    result = bench("--requests", "1", "--repeats", "2", "--draft-length", "2,auto", "--max-tokens", "5")
    assert result.exit_code == 0
    warm_up, *passes = fake.requests
    assert draft_lengths(passes) == [0, 2, None, None, 2, 0]
    assert {request.sampling.max_tokens for request in passes} == {5}
    assert {len(request.messages.messages) for request in passes} == {1}
    assert warm_up.messages == passes[0].messages


def test_its_tables_fit_a_terminal(address: str) -> None:
    result = bench("--requests", "2", "--repeats", "2", "--temperature", "0,0.75")
    lines = result.stdout.splitlines()
    for title in ("Speed", "Speculation", "Latency, ms", "A round, ms"):
        assert title in [line.strip() for line in lines]
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert "4 of 4 greedy texts are those of speculation off, token for token" in result.stdout
    assert result.stderr.splitlines()[:5] == [
        "warming up",
        "1 at once, temperature 0, K off, pass 1 of 2",
        "1 at once, temperature 0, K auto, pass 1 of 2",
        "1 at once, temperature 0, K auto, pass 2 of 2",
        "1 at once, temperature 0, K off, pass 2 of 2",
    ]


def test_it_writes_numbers_and_a_page(address: str, tmp_path: Path) -> None:
    result = bench("--requests", "1", "--repeats", "1", "--temperature", "0,0.5", "--out", str(tmp_path / "a" / "b"))
    assert result.exit_code == 0
    value = json.loads((tmp_path / "a" / "b.json").read_text())
    settings = [(each["setting"]["temperature"], each["setting"]["draft_length"]) for each in value["results"]]
    assert settings == [(0, 0), (0, None), (0.5, 0), (0.5, None)]
    assert (value["address"], value["started_by"], value["prompts"]) == (address, "", "our own")
    assert "<svg" in (tmp_path / "a" / "b.html").read_text()


def test_a_prompt_file_is_asked(fake: FakeGeneration, address: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    assert bench("--prompts", str(file), "--repeats", "1", "--draft-length", "0").exit_code == 0
    asked = [request.messages.messages[0].content for request in fake.requests]
    assert asked == ["one", "two"] * 2  # the first two warm up
    file.write_text('{"turns": ["one"]}\nnonsense\n')
    result = bench("--prompts", str(file))
    assert result.exit_code == 1
    assert f"error: {file}, line 2: no JSON" in result.stderr.replace("\n", " ")


def test_synthetic_prompts_fit_the_model(fake: FakeGeneration, address: str) -> None:
    flags = ["--requests", "3", "--repeats", "1", "--rate", "1000"]
    assert bench("--synthetic", "20,5", *flags).exit_code == 0
    assert {len(request.token_ids.ids) for request in fake.requests} == {20}
    assert max(token_id for request in fake.requests for token_id in request.token_ids.ids) < 9
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos) for r in fake.requests} == {(5, True)}
    fake.requests.clear()
    result = bench("--synthetic", "60,5", *flags)
    assert result.exit_code == 1
    assert "--synthetic is 60,5; together they may be at most 64 tokens for tiny" in result.stderr
    assert fake.requests == []


def test_without_a_draft_there_is_nothing_to_compare(
    fake: FakeGeneration, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = pb.GetServerInfoResponse()
    info.CopyFrom(fake_generation.INFO)
    info.draft_replica_count = 0
    monkeypatch.setattr(fake_generation, "INFO", info)
    result = bench("--requests", "1", "--repeats", "1")
    assert "this server has no draft, so that only K off is measured" in result.stderr
    assert draft_lengths(fake.requests) == [0, 0]


def test_the_server_s_own_draft_length_is_measured_unless_others_are_named(
    fake: FakeGeneration, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--requests", "1", "--repeats", "1"]
    assert bench(*flags).exit_code == 0
    assert draft_lengths(fake.requests) == [None, 0, None]  # the first warms up
    info = pb.GetServerInfoResponse()
    info.CopyFrom(fake_generation.INFO)
    info.adaptive_draft_length = False
    monkeypatch.setattr(fake_generation, "INFO", info)
    fake.requests.clear()
    assert bench(*flags).exit_code == 0
    assert draft_lengths(fake.requests) == [4, 0, 4]
    result = bench(*flags, "--draft-length", "2,auto")
    assert result.exit_code == 1
    assert "this server always drafts 4 tokens a round" in result.stderr


def test_failures_are_counted_shown_and_told_by_the_exit_code(fake: FakeGeneration, address: str) -> None:
    fake.script = [started(), Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")]
    result = bench("--requests", "2", "--repeats", "1", "--draft-length", "0")
    assert result.exit_code == 1
    assert "2 of 2 requests failed (1 at once, K off): the queue is full" in result.stdout


def test_nobody_there_says_how_to_start_somebody() -> None:
    result = bench("--server", unused_address())
    assert result.exit_code == 1
    assert "start a server with `pilotfish up`" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--up", "", "--server", "h:1"],
        ["--up", "--target 'x"],
        ["--rate", "1", "--concurrency", "1"],
        ["--prompts", "f", "--synthetic", "1,1"],
        ["--synthetic", "1,1", "--max-tokens", "5"],
        ["--synthetic", "5"],
        ["--synthetic", "0,5"],
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--concurrency", ""],
        ["--rate", "0"],
        ["--rate", "inf"],
        ["--temperature", "-1"],
        ["--draft-length", "65"],
        ["--draft-length", "server,2"],
        ["--repeats", "0"],
        ["--requests", "0"],
    ],
)
def test_bad_usage_exits_with_2_and_asks_nothing(flags: list[str], fake: FakeGeneration, address: str) -> None:
    assert bench(*flags).exit_code == 2
    assert fake.requests == []


def test_without_matplotlib_it_says_what_to_install(
    fake: FakeGeneration, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("--out", str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "pip install 'pilotfish[bench]'" in result.stderr
    assert fake.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() == 0 and not Path("/proc").exists(), reason="needs /proc to refuse a folder")
def test_a_folder_that_cannot_be_made_is_told_before_measuring(fake: FakeGeneration, address: str) -> None:
    result = bench("--out", "/proc/nothing/x")
    assert result.exit_code == 1
    assert "whose folder cannot be made" in result.stderr
    assert fake.requests == []


def test_ctrl_c_reports_what_was_measured(fake: FakeGeneration, address: str) -> None:
    class Stuck(FakeGeneration):
        """Answers the warm-up and three passes, and then no more."""

        def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
            self.script = answer() if len(self.requests) < 4 else [Wait()]
            return super().Generate(request, context)

    argv = [sys.executable, "-P", "-m", "pilotfish", "bench", "--requests", "1", "--repeats", "3"]
    stuck = Stuck()
    with serving(stuck) as other:
        env = {**os.environ, "PILOTFISH_SERVER": other, "COLUMNS": "80"}
        # Ignored in what a shell starts in its background, and so in its children too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(5)]  # the warm-up and four passes have begun
        assert lines[-1] == "1 at once, K off, pass 2 of 3\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped after 3 of 6 passes" in stderr
    assert "Traceback" not in stderr
    rows = [line.split() for line in stdout.splitlines()]
    assert [row[:5] for row in rows if row[:2] in (["1", "off"], ["1", "auto"])][:2] == [
        ["1", "off", "0", "of", "1"],
        ["1", "auto", "0", "of", "2"],
    ]
