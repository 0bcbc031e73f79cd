"""What ``pilotfish check`` judges answers by."""

from __future__ import annotations

from typing import Any

import pytest
from check_answers import INFO, answer, words

from pilotfish import Completion, SamplingParams
from pilotfish.check.audit import audit
from pilotfish.check.compare import difference, first_difference
from pilotfish.check.endings import Ending, cut_at_stop_text, cut_at_stop_token, misses, stop_texts

TWO_ROUNDS = answer([(1, "a", "b")], [(2, "b", "a"), (3, "c", "r")], drafted=2)


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([3], [1, 3], 0)],
)
def test_sequences_part_at(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index
    assert first_difference(other, one) == index


def test_a_difference_is_told_in_words() -> None:
    assert difference(TWO_ROUNDS, TWO_ROUNDS) is None
    other = answer([(1, "a", "b")], [(9, "b", "a"), (3, "c", "r")])
    assert difference(TWO_ROUNDS, other) == "token 2 is 9 (accepted) instead of 2 (accepted)"
    assert difference(TWO_ROUNDS, answer([(1, "a", "b")])) == "token 2 is missing (length) instead of 2 (accepted)"
    text = answer([(1, "a", "b")], [(2, "b", "a"), (3, "X", "r")])
    assert difference(TWO_ROUNDS, text) == "same tokens, other text: 'abX' instead of 'abc'"
    ended = answer([(1, "a", "b")], [(2, "b", "a"), (3, "c", "r")], reason="stop")
    assert difference(TWO_ROUNDS, ended) == "same tokens, but finish_reason is stop instead of length"


SOUND: list[tuple[dict[str, Any], Completion]] = [
    ({"max_tokens": 3}, TWO_ROUNDS),
    ({"max_tokens": 9}, answer([(1, "a", "b")], reason="stop")),
    ({"max_tokens": 3, "stop_token_ids": [3]}, answer([(1, "a", "b")], [(3, "", "r")], reason="stop")),
    ({"max_tokens": 3, "stop": "c"}, answer([(1, "a", "b")], reason="stop")),
    ({"max_tokens": 3, "draft_length": 2}, TWO_ROUNDS),
]
UNSOUND: list[tuple[dict[str, Any], Completion, str]] = [
    ({"max_tokens": 2}, TWO_ROUNDS, "3 tokens with max_tokens 2"),
    ({"max_tokens": 1}, answer([(50, "a", "b")]), "token id 50 in a vocabulary of 50"),
    ({"max_tokens": 1}, answer([(1, "a", "b")], completion_tokens=2), "1 tokens, but usage counts 2"),
    ({"max_tokens": 3, "stop": ["x", "bc"]}, TWO_ROUNDS, "the text has the stop text 'bc'"),
    ({"max_tokens": 3, "stop_token_ids": [2]}, TWO_ROUNDS, "tokens follow stop token 2"),
    ({"max_tokens": 3, "stop_token_ids": [3]}, TWO_ROUNDS, "ended with stop token 3, but finish_reason is length"),
    ({"max_tokens": 4}, TWO_ROUNDS, "finish_reason is length after 3 of 4 tokens"),
    (
        {"max_tokens": 4, "ignore_eos": True},
        answer([(1, "a", "b")], reason="stop"),
        "finish_reason is stop, but the request had nothing to stop at",
    ),
    ({"max_tokens": 3}, answer([(1, "a", "b"), (2, "b", "a"), (3, "c", "a")], drafted=1), "2 tokens of kind accepted"),
    ({"max_tokens": 3, "draft_length": 1}, TWO_ROUNDS, "2 tokens drafted in a round with draft_length 1"),
    ({"max_tokens": 3, "draft_length": 0}, answer([(1, "a", "b")] * 3), "a round of 3 tokens with draft_length 0"),
]


@pytest.mark.parametrize(("params", "sound"), SOUND)
def test_sound_answers_pass_the_audit(params: dict[str, Any], sound: Completion) -> None:
    assert audit(SamplingParams(**params), sound, INFO) == []


@pytest.mark.parametrize(("params", "unsound", "fault"), UNSOUND)
def test_the_audit_finds(params: dict[str, Any], unsound: Completion, fault: str) -> None:
    assert any(found.startswith(fault) for found in audit(SamplingParams(**params), unsound, INFO))


def test_where_a_stop_text_ends_an_answer() -> None:
    whole = words("Hel", "lo ", "wor", "ld", "!")
    assert cut_at_stop_text(whole, ["o w"]) == Ending((0, 1), "Hell", "stop")
    assert cut_at_stop_text(whole, ["world", "lo"]) == Ending((0,), "Hel", "stop")
    # The one that is complete first counts, though it begins later.
    assert cut_at_stop_text(whole, ["lo world!", "wo"]) == Ending((0, 1), "Hello ", "stop")
    assert cut_at_stop_text(whole, ["Hello"]) == Ending((), "", "stop")
    # A token without text of its own may be part of the next character, or be nothing.
    assert cut_at_stop_text(words("a", "", "é"), ["é"]) is None
    assert cut_at_stop_text(words("a", "", "é", "b"), ["b"]) == Ending((0, 1, 2), "aé", "stop")
    assert cut_at_stop_text(whole, ["never"]) == Ending(whole.token_ids, "Hello world!", "length")


def test_where_a_stop_token_ends_an_answer() -> None:
    assert cut_at_stop_token(words("a", "b", "c", "b"), 1) == Ending((0, 1), "a", "stop")


def test_an_ending_is_missed_by_tokens_text_or_reason() -> None:
    ending = Ending((1, 2), "ab", "stop")
    assert misses(ending, answer([(1, "a", "b"), (2, "b", "b")], reason="stop")) == []
    assert misses(ending, answer([(1, "a", "b"), (2, "b", "b"), (3, "", "b")], reason="stop")) == [
        "3 tokens instead of 2, other from token 3 on"
    ]
    assert misses(ending, answer([(1, "a", "b"), (2, "bc", "b")])) == [
        "the text ends with 'abc' instead of 'ab'",
        "finish_reason is length instead of stop",
    ]
    # An answer that ends inside a character has a mark instead, and the longer one has the character.
    assert misses(ending, answer([(1, "a", "b"), (2, "b\ufffd", "b")], reason="stop")) == []
    assert misses(Ending((1, 2), None, "stop"), answer([(1, "a", "b"), (2, "x", "b")], reason="stop")) == []


def test_stop_texts_lie_in_the_answer_and_over_its_edges() -> None:
    whole = words(*(f"word{index} " for index in range(12)))
    found = stop_texts(whole)
    assert ("1 wo",) in found  # over the edge of two tokens
    assert ("w",) in found
    assert any(len(stops) == 2 for stops in found)
    assert all(stop for stops in found for stop in stops)
    endings = [cut_at_stop_text(whole, stops) for stops in found]
    assert {ending.reason for ending in endings if ending is not None} == {"stop", "length"}
