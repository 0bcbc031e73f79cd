"""Several processes train as one: torchrun with gloo, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from captured import write_captured
from tiny_models import make_tiny_llama

from draft_svc.training import checkpoint
from draft_svc.training.processes import joined

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run without chance: what a process draws for its half of a batch is not what one draws for the whole."""
    folder = tmp_path_factory.mktemp("processes")
    model = make_tiny_llama(folder / "target", layers=6, words=64, sharpness=8.0)
    data = write_captured(folder / "data", model, documents=60)
    given = {"target-model": model, "data": data, "dtype": "float32", "draft-vocab": 40, "steps": 2, "threads": 1}
    given |= {"later-slots": 1, "other-candidates": 0, "batch-tokens": 128, "warmup-steps": 2, "cooldown": 0}
    given |= {"measure-every": 3, "lr": 0.0005}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def fit(flags: Sequence[str], out: Path, visits: int, processes: int) -> None:
    command = ["-m", "pilotfish", "train", "fit", *flags, "--out", str(out), "--visits", str(visits)]
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr


def log(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_processes_with_half_batches_equal_one_with_whole_ones(flags: Sequence[str], tmp_path: Path) -> None:
    fit(flags, tmp_path / "one", 400, processes=1)
    fit(flags, tmp_path / "two", 400, processes=2)
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert len(one) == len(two) > 5
    for alone, both in zip(one, two, strict=True):
        assert (alone["visits"], alone["rows"]) == (both["visits"], both["rows"])
        assert both["logits"] == pytest.approx(alone["logits"], rel=1e-3)
        assert both["states"] == pytest.approx(alone["states"], rel=1e-3)
    trained = [torch.load(tmp_path / name / checkpoint.FILE)["trainee"] for name in ("one", "two")]
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_two_processes_go_on_where_they_stopped(flags: Sequence[str], tmp_path: Path) -> None:
    fit(flags, tmp_path / "whole", 300, processes=2)
    fit(flags, tmp_path / "parts", 150, processes=2)
    fit(flags, tmp_path / "parts", 300, processes=2)
    whole, parts = log(tmp_path / "whole"), log(tmp_path / "parts")
    assert [line["visits"] for line in parts] == [line["visits"] for line in whole]
    assert [line["logits"] for line in parts] == [line["logits"] for line in whole]


def test_a_process_alone_joins_nobody() -> None:
    with joined() as process:
        assert process.rank == 0
        assert not torch.distributed.is_initialized()
