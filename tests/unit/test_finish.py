"""Finish conditions: examples."""

from __future__ import annotations

import pytest

from orchestrator.core.finish import FinishReason, StopScanner, cut_run

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "generated", "max_tokens", "kept", "reason"),
    [
        ([5, 6, 7], 0, 64, 3, None),
        ([5, 2, 7], 0, 64, 2, STOP),
        ([2], 0, 64, 1, STOP),
        ([5, 3, 2], 0, 64, 2, STOP),
        ([5, 6, 7], 61, 64, 3, LENGTH),
        ([5, 6, 7], 62, 64, 2, LENGTH),
        ([5, 2, 7], 62, 64, 2, STOP),
        ([5, 6, 2], 62, 64, 2, LENGTH),
        ([5], 0, 1, 1, LENGTH),
    ],
)
def test_cut_run(tokens: list[int], generated: int, max_tokens: int, kept: int, reason: FinishReason | None) -> None:
    assert cut_run(tokens, generated, max_tokens, {2, 3}) == (kept, reason)


def test_end_tokens_that_are_ignored_are_tokens_like_any_other() -> None:
    assert cut_run([5, 2, 7], 0, 64, frozenset()) == (3, None)


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    return [scanner.push(piece) for piece in pieces], scanner.is_stopped


def test_without_stop_strings_text_passes_through() -> None:
    assert feed([], ["ab", "", "c"]) == (["ab", "", "c"], False)


def test_a_stop_string_across_pieces_never_leaves() -> None:
    assert feed(["\n\nQ:"], ["A: 4\n", "\n", "Q", ":", " next"]) == (["A: 4", "", "", "", ""], True)


def test_text_held_back_leaves_once_it_cannot_be_a_stop_string() -> None:
    assert feed(["</s>"], ["a<", "/", "b"]) == (["a", "", "</b"], False)


def test_only_the_end_that_may_still_grow_is_held_back() -> None:
    assert feed(["aab"], ["aaa", "c"]) == (["a", "aac"], False)


def test_the_first_stop_string_to_be_complete_wins() -> None:
    assert feed(["abcd", "bc"], ["xabcd"]) == (["xa"], True)
    assert feed(["abcd", "bc"], ["x", "a", "b", "c", "d"]) == (["x", "", "", "a", ""], True)


def test_of_stop_strings_complete_at_the_same_character_the_longest_wins() -> None:
    assert feed(["bc", "abc"], ["xabc"]) == (["x"], True)


def test_flush_releases_what_was_held_back_once() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.push("the ST") == "the "
    assert scanner.flush() == "ST"
    assert scanner.flush() == ""


def test_nothing_is_held_back_after_a_stop() -> None:
    scanner = StopScanner(["ab", "x"])
    assert scanner.push("1ab2x a") == "1"
    assert scanner.flush() == ""
