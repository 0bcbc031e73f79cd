"""Measuring heads: what rounds add up to, and the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_passes import completion
from head_results import Variant, as_json, from_json, markdown, mean_tokens_per_round, task_result, together
from heads import named, read_tasks, require_same
from typer import BadParameter

from pilotfish.errors import InvalidArgumentError

CHAT = task_result("chat", [completion([(2, 3), (0, 3)]), completion([(3, 3), (1, 3), (0, 0)])], seconds=2.0)
CODE = task_result("code", [completion([(1, 2), (1, 2)])], seconds=1.0)


def test_a_task_counts_its_rounds() -> None:
    assert (CHAT.requests, CHAT.rounds, CHAT.drafted) == (2, 5, 12)
    assert (CHAT.judged, CHAT.kept) == ((4, 3, 2), (3, 2, 1))
    assert CHAT.acceptance == (3 / 4, 2 / 3, 1 / 2)
    assert CHAT.tokens_per_round == pytest.approx((3 + 1 + 4 + 2 + 1) / 5)
    assert CHAT.output_tokens == 2 + 3 + 1 + 4 + 2 + 1
    assert CHAT.tokens_per_s == CHAT.output_tokens / 2


def test_nothing_drafted_is_one_token_a_round() -> None:
    plain = task_result("chat", [completion([(0, 0), (0, 0)])], seconds=1.0)
    assert (plain.tokens_per_round, plain.acceptance, plain.rounds) == (1.0, (), 2)


def test_a_position_counts_where_a_token_was_drafted_for_it() -> None:
    """One that never was accepted counts as such, and a shorter draft says nothing of what it lacks."""
    cut = task_result("chat", [completion([(1, 3), (2, 2), (1, 1)])], seconds=1.0)
    assert cut.acceptance == (1.0, 1 / 2)
    assert task_result("chat", [completion([(1, 2)])], seconds=1.0).acceptance == (1.0, 0.0)


def test_tasks_together_and_their_mean() -> None:
    whole = together([CHAT, CODE])
    assert (whole.judged, whole.kept) == ((6, 5, 2), (5, 2, 1))
    assert whole.acceptance == (5 / 6, 2 / 5, 1 / 2)
    assert mean_tokens_per_round([CHAT, CODE]) == pytest.approx((2.2 + 2.0) / 2)


def test_results_come_back_from_json_and_make_tables() -> None:
    results = {Variant("mtp", "chain", 0.0): [CHAT, CODE], Variant("mtp", "chain", 1.0): [CHAT]}
    assert from_json(as_json(results, {"target": "tiny"})) == results
    first, second = markdown(results).split("\nShare of")
    assert first.splitlines()[4:] == [
        "| mtp | chain | 0 | 2.20 | 2.00 | **2.10** | 6 |",
        "| mtp | chain | 1 | 2.20 | – | **2.20** | 6 |",
    ]
    assert second.splitlines()[2] == "| drafter | shape | T | 1 | 2 | 3 | drafted a round | rounds |"
    assert second.splitlines()[4] == "| mtp | chain | 0 | 0.83 | 0.40 | 0.50 | 2.3 | 7 |"


def test_tasks_are_files_or_the_categories_of_our_own_prompts(tmp_path: Path) -> None:
    assert {len(prompts) for prompts in read_tasks(None, 3).values()} == {3}
    assert len(read_tasks(None, None)) == 6
    (tmp_path / "qa.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    assert [prompt.content for prompt in read_tasks(tmp_path, None)["qa"]] == ["one", "two"]
    with pytest.raises(InvalidArgumentError, match=r"holds no \*\.jsonl"):
        read_tasks(tmp_path / "other", None)


def test_values_have_names() -> None:
    assert named("--shape", ["tree=--draft-tree=24", "off=--draft-length 0"]) == {
        "tree": "--draft-tree=24",
        "off": "--draft-length 0",
    }
    with pytest.raises(BadParameter, match="must be NAME=VALUE"):
        named("--shape", ["chain"])


def test_other_settings_are_not_mixed(tmp_path: Path) -> None:
    facts = {"target": "a", "up": "", "prompts": {"chat": 3}, "max_tokens": 8, "shapes": {"chain": "--draft-length 4"}}
    path = tmp_path / "heads.json"
    path.write_text(as_json({}, facts))
    more = facts | {"shapes": {"tree": "--draft-tree 9"}}
    require_same(path, more)
    assert more["shapes"] == {"chain": "--draft-length 4", "tree": "--draft-tree 9"}
    with pytest.raises(InvalidArgumentError, match="max_tokens is 9"):
        require_same(path, facts | {"max_tokens": 9})
    with pytest.raises(InvalidArgumentError, match="shape chain is '--draft-length 5'"):
        require_same(path, facts | {"shapes": {"chain": "--draft-length 5"}})
