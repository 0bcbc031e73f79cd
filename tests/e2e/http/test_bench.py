"""``pilotfish bench --base-url`` against our own API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deployment import Deployment, wait_until_idle
from http_api import url
from typer.testing import CliRunner

from pilotfish.cli.main import app


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_it_measures_our_own_api(deployment: Deployment, tmp_path: Path, endpoint: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["hello there"]}\n{"turns": ["the cat and the hat"]}\n')
    argv = ["bench", "--base-url", f"{url(deployment)}/v1", "--endpoint", endpoint, "--prompts", str(prompts)]
    argv += ["--max-tokens", "12", "--repeats", "1", "--concurrency", "1,2", "--out", str(tmp_path / "r")]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["server"]["model"] == "tiny"
    for found in report["results"]:
        assert (found["requests"], found["failures"]) == (2, {})
        assert found["output_tokens"] == 2 * 12  # of the usage, as rounds bring several a chunk
        assert found["prompt_tokens"] > 0
        assert found["first_token"]["median"] > 0
        assert found["inter_token"]["median"] < found["pause"]["median"]
    assert report["notes"] == []
    wait_until_idle(deployment)
