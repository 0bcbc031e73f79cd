"""From a target's text to a head that drafts: trained on few documents until it knows them, judged as it is served."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from captured import write_captured
from tiny_models import make_tiny_llama
from typer.testing import CliRunner

from draft_svc.training.shards import Manifest, Shard, shard_paths
from pilotfish.cli.main import app


def run(*flags: object) -> str:
    result = CliRunner().invoke(app, ["train", *map(str, flags)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def bigram_acceptance(data: Path) -> float:
    """Of draft tokens by the likeliest follower in this very text, at the places that a head drafts at."""
    manifest, followers, places = Manifest.read(data), defaultdict(Counter), []
    for document in (each for path in shard_paths(data) for each in Shard.read(path, manifest.feature_width).split()):
        tokens = document.token_ids.tolist()
        for position in range(document.prompt_length + 1, len(tokens)):
            followers[tokens[position - 1]][tokens[position]] += 1
            places.append((tokens[position - 1], tokens[position]))
    return sum(followers[before].most_common(1)[0][0] == token for before, token in places) / len(places)


@pytest.mark.parametrize("scheme", ["mtp", "eagle3", "distill"])
def test_a_head_that_knows_its_text_beats_bigrams(scheme: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "target", layers=8, words=64, sharpness=8.0)
    data = write_captured(tmp_path / "data", model, documents=60)
    shared = ("--data", data, "--target-model", model)
    flags = ("--draft-vocab", 64, "--batch-tokens", 256, "--other-candidates", 0, "--later-slots", 1, "--threads", 1)
    flags += ("--draft-layers", "0,1,7", "--dtype", "float32", "--measure-every", 1000, "--visits", 20_000)
    run("fit", *shared, *flags, "--scheme", scheme, "--out", tmp_path / "run")
    judging = ("--every", 1, "--draft-length", 2, "--all", "--dtype", "float32", "--json")
    found = json.loads(run("evaluate", *shared, *judging, "--head", tmp_path / "run" / "head"))
    first = found["greedy"][0]["accepted"]
    baseline = bigram_acceptance(data)
    assert first > baseline
    assert found["greedy_tokens_per_round"] > 1 + baseline + baseline**2
