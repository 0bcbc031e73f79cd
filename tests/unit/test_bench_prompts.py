"""Prompt files: what is read, and what is refused by its line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pilotfish.bench.prompts import Prompt, parse, read, shipped, synthetic, take
from pilotfish.errors import InvalidArgumentError, NotFoundError


def test_our_own_prompts_are_six_tasks_in_turn() -> None:
    prompts = shipped()
    categories = [prompt.category for prompt in prompts]
    assert len({prompt.content for prompt in prompts}) == 24
    assert set(Counter(categories).values()) == {4}
    assert categories == categories[:6] * 4


def test_the_first_turn_is_asked() -> None:
    text = '{"id": 1, "category": "maths", "turns": ["one", "two"]}\n\n{"turns": ["thrée"]}\n'
    assert parse(text, "f") == [Prompt("maths", "one"), Prompt("", "thrée")]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[1]", "`turns` must be"),
        ('{"prompt": "x"}', "`turns` must be"),
        ('{"turns": []}', "`turns` must be"),
        ('{"turns": [1]}', "`turns` must be"),
        ('{"turns": [""]}', "`turns` must be"),
        ('{"turns": "x"}', "`turns` must be"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_line(line: str, fault: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^f, line 3: {fault}"):
        parse(f'{{"turns": ["x"]}}\n\n{line}\n', "f")


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no prompts"):
        parse("\n", "f")
    with pytest.raises(NotFoundError, match="cannot be read"):
        read(tmp_path / "nothing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="no text in UTF-8"):
        read(tmp_path / "binary")


def test_taking_more_begins_again() -> None:
    prompts = [Prompt("", "a"), Prompt("", "b")]
    assert [prompt.content for prompt in take(prompts, 5)] == ["a", "b", "a", "b", "a"]
    assert take(prompts, 1) == prompts[:1]
    assert take(prompts, None) == prompts


def test_synthetic_prompts_are_ids_of_the_vocabulary() -> None:
    prompts = synthetic(20, 30, 7, np.random.default_rng(1))
    assert [len(prompt.content) for prompt in prompts] == [30] * 20
    assert {token_id for prompt in prompts for token_id in prompt.content} == set(range(7))
    assert len({prompt.content for prompt in prompts}) == 20
    assert all(isinstance(token_id, int) for token_id in prompts[0].content)
