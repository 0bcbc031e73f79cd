"""``pilotfish train`` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_heads import FORMATS
from typer.testing import CliRunner

from draft_svc.training.shards import Manifest
from pilotfish.cli.main import app


def test_prompts_then_capture_then_the_same_again(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts, data = tmp_path / "prompts.jsonl", tmp_path / "data"
    made = CliRunner().invoke(app, ["train", "prompts", "--out", str(prompts)])
    assert made.exit_code == 0
    assert made.stderr.startswith("wrote ")
    flags = ["--target-model", str(model_folder("llama")), "--prompts", str(prompts), "--out", str(data)]
    flags += ["--tokens", "60", "--max-tokens", "12", "--rows", "3", "--max-len", "400"]
    first = CliRunner().invoke(app, ["train", "capture", *flags])
    assert first.exit_code == 0, first.stderr
    assert "answer tokens and hidden.1, hidden.2, final at each" in first.stderr
    assert Manifest.read(data).answer_tokens >= 60
    second = CliRunner().invoke(app, ["train", "capture", *flags])
    assert second.stderr.splitlines()[-1] == first.stderr.splitlines()[-1]


def test_a_capture_says_when_prompts_run_out_or_do_not_fit(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["short"]}\n{"turns": ["' + "long " * 90 + '"]}\n')
    flags = ["--target-model", str(model_folder("llama")), "--prompts", str(prompts), "--out", str(tmp_path / "data")]
    result = CliRunner().invoke(app, ["train", "capture", *flags, "--max-len", "128", "--max-tokens", "8"])
    assert result.exit_code == 0
    assert "1 prompts leave no room for an answer within --max-len 128" in result.stderr
    assert "the prompts are used up" in result.stderr


def test_evaluate_prints_a_table_or_one_object(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    target, data = str(model_folder("llama")), str(tmp_path / "data")
    head = str(FORMATS["own"].write(tmp_path / "head"))
    flags = ["--tokens", "150", "--temperatures", "0,1", "--max-tokens", "24", "--max-len", "200"]
    captured = CliRunner().invoke(app, ["train", "capture", "--target-model", target, "--out", data, *flags])
    assert captured.exit_code == 0, captured.stderr
    flags = ["--head", head, "--data", data, "--target-model", target, "--draft-length", "2"]
    found = json.loads(CliRunner().invoke(app, ["train", "evaluate", *flags, "--all", "--json"]).stdout)
    assert found["greedy"][0]["judged"] > 3
    assert found["sampled"][0]["loss"] > 1
    shown = CliRunner().invoke(app, ["train", "evaluate", *flags, "--all"])
    assert f"{found['greedy_tokens_per_round']:.2f} tokens per round of 2 drafts" in shown.stdout
    held_out = CliRunner().invoke(app, ["train", "evaluate", *flags])
    assert held_out.exit_code == 1
    assert "capture more" in held_out.stderr


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--temperatures", "0,hot"], 2, "--temperatures is '0,hot'"),
        (["--temperatures", "nan"], 2, "--temperatures is 'nan'"),
        (["--ask-itself", "2"], 1, "ask_itself is 2.0"),
        (["--features", "hidden.77"], 1, "features names 'hidden.77'"),
        (["--prompts", "missing.jsonl"], 1, "missing.jsonl cannot be read"),
    ],
)
def test_bad_flags_are_refused(
    model_folder: Callable[..., Path], tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    given = ["--target-model", str(model_folder("llama")), "--out", str(tmp_path), *flags]
    result = CliRunner().invoke(app, ["train", "capture", *given])
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--draft-layers", "first"], 2, "--draft-layers is 'first'"),
        (["--scheme", "eagle3", "--norms", "none"], 1, "norms is 'none'"),
        ([], 1, "`pilotfish train capture --out"),
    ],
)
def test_bad_fits_are_refused(
    model_folder: Callable[..., Path], tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    given = ["--target-model", str(model_folder("llama")), "--data", str(tmp_path), "--out", str(tmp_path), *flags]
    result = CliRunner().invoke(app, ["train", "fit", *given])
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_the_demo_goes_the_whole_way_and_not_twice(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    flags = ["--target-model", str(model_folder("llama", layers=6)), "--out", str(tmp_path), "--draft-vocab", "200"]
    flags += ["--tokens", "5000", "--visits", "3000", "--threads", "1"]
    result = CliRunner().invoke(app, ["train", "demo", *flags])
    assert result.exit_code == 0, result.stderr
    assert "tokens per round" in result.stdout
    assert f"--draft {tmp_path / 'trained' / 'head'} --dtype bfloat16" in result.stdout
    heads = [tmp_path / name / "head" / "model.safetensors" for name in ("untrained", "trained")]
    made = [head.stat().st_mtime_ns for head in heads]
    shipped, run = tmp_path / "shipped", tmp_path / "trained"
    given = ["--run", str(run), "--data", str(tmp_path / "data"), "--out", str(shipped), *flags[:2]]
    exported = CliRunner().invoke(app, ["train", "export", *given])
    assert exported.exit_code == 0, exported.stderr
    assert "visits of answer tokens" in (shipped / "README.md").read_text()
    assert (shipped / "model.safetensors").read_bytes() == heads[1].read_bytes()
    assert CliRunner().invoke(app, ["train", "demo", *flags]).exit_code == 0
    assert [head.stat().st_mtime_ns for head in heads] == made
