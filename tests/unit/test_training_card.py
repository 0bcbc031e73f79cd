"""The card of a head: what it says, and that it makes nothing up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draft_svc.training.card import Training, card
from draft_svc.training.evaluate import Evaluation, GreedyStep, SampledStep
from draft_svc.training.shards import Manifest
from pilotfish.errors import InvalidArgumentError

RECIPE = {"ask_itself": 0.5, "prompts": 300, "temperatures": [0, 0, 1.0, 0.7], "max_tokens": 256}
MANIFEST = Manifest("big", "0123456789abcdef0123", "t", ("final",), 8, "bfloat16", RECIPE, 2, 2, 40, 5000, 4000)
FOUND = Evaluation(
    drafter="head",
    documents=2,
    greedy=(GreedyStep(100, 0.51), GreedyStep(51, 0.62)),
    greedy_tokens_per_round=1.83,
    sampled=(SampledStep(90, 2.5, 0.4, 0.7, 0.45),),
    expected_tokens_per_round=1.45,
)
CONFIG = {"num_hidden_layers": 1, "hidden_size": 8, "draft_vocab_size": 20, "vocab_size": 50}


def test_a_card_tells_data_training_and_acceptance() -> None:
    text = card("mtp", "mtp", CONFIG, 8_400_000, MANIFEST, Training(300, 90_000, 1830.0), FOUND, "MIT")
    assert text.startswith("# mtp: multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437) for big\n")
    for fact in (
        "8.4 MB in bfloat16, 1 layer of 8, drafts 20 of 50 tokens.",
        "40 answers of big itself, 4000 tokens",
        "50% of the questions are the model's own",
        "300 prompts; temperatures 0 (50%), 1 (25%), 0.7 (25%)",
        "300 steps, 90000 visits of answer tokens, 30 minutes.",
        "tokens per round 1.83 greedily, 1.45 expected at temperature 1.",
        "| 1 | 0.51 | 0.45 | 2.50 | 0.70 |\n| 2 | 0.62 | – | – | – |",
        "the weights `0123456789abcdef…`",
        "## Licence\n\nMIT\n",
    ):
        assert fact in text


def test_a_card_leaves_out_what_nobody_knows() -> None:
    bare = Manifest("big", "0123", "t", ("final",), 8, "bfloat16", {})
    greedy = Evaluation("head", 2, FOUND.greedy, 1.83, (), None)
    text = card("medusa", "medusa", {}, 100, bare, Training(1, 1, 1.0), greedy)
    assert "temperature 1." not in text
    assert "Magpie" not in text
    assert "Licence" not in text


def test_a_log_tells_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"step": n, "visits": 10 * n, "seconds": 0.5 * n}) for n in (1, 2)) + "\n")
    assert Training.read(log) == Training(2, 20, 1.0)
    for content in ("", "{}", "text"):
        log.write_text(content)
        with pytest.raises(InvalidArgumentError, match="no log of `pilotfish train fit`"):
            Training.read(log)
