"""Finish conditions against slow twins that look at the whole text or run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.finish import FinishReason, StopScanner, cut_run

texts = st.text(alphabet="ab\né", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab\né", min_size=1, max_size=4), max_size=4)


def twin_of_scanner(stops: list[str], text: str) -> tuple[str, int | None]:
    """What may leave of the whole text, and the length at which it stopped."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], end
    return text, None


@given(stop_lists, st.lists(texts, max_size=6))
def test_scanner_lets_out_what_a_search_in_the_whole_text_does(stops: list[str], pieces: list[str]) -> None:
    scanner, out, stopped_after = StopScanner(stops), "", None
    for index, piece in enumerate(pieces):
        out += scanner.push(piece)
        if scanner.is_stopped and stopped_after is None:
            stopped_after = index
    out += scanner.flush()
    expected, end = twin_of_scanner(stops, "".join(pieces))
    assert out == expected
    if end is None:
        assert stopped_after is None
    else:
        assert stopped_after is not None
        assert len("".join(pieces[:stopped_after])) < end <= len("".join(pieces[: stopped_after + 1]))


@given(stop_lists, st.lists(texts, max_size=6))
def test_scanner_holds_back_no_more_than_it_must(stops: list[str], pieces: list[str]) -> None:
    """What is held back could become a stop string; all before it has left."""
    scanner, out, seen = StopScanner(stops), "", ""
    for piece in pieces:
        out += scanner.push(piece)
        seen += piece
        if scanner.is_stopped:
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        for longer in range(len(held) + 1, len(seen) + 1):
            assert not any(stop.startswith(seen[-longer:]) for stop in stops)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(0, 10),
    st.integers(1, 12),
    st.frozensets(st.integers(0, 5), max_size=3),
)
def test_cut_run_is_what_one_token_at_a_time_gives(
    tokens: list[int], generated: int, more: int, ends: frozenset[int]
) -> None:
    max_tokens = generated + more
    kept, reason = 0, None
    for token in tokens:
        kept += 1
        if token in ends:
            reason = FinishReason.STOP
        elif generated + kept == max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    assert cut_run(tokens, generated, max_tokens, ends) == (kept, reason)
