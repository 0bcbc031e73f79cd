"""Text, ids and log probabilities end together, however text falls into tokens and tokens into rounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason
from orchestrator.core.requests import Params, Request, TokenLogprobs
from orchestrator.core.rounds import Run
from orchestrator.detokenizer import Detokenizer
from orchestrator.leaving import Leaving, LeftToken

REQUEST = Request("r", np.array([1], np.int32), Params(max_tokens=100))
END = 1000  # an end token's id; those below are the tokens of the text, in order


def runs(lengths: list[int], reason: FinishReason) -> list[Run]:
    """Tokens 0, 1, ... in rounds; the last one ends the completion, for STOP with an end token."""
    ids = list(range(sum(lengths))) + ([END] if reason is FinishReason.STOP else [])
    ends = [*np.cumsum(lengths).tolist()]
    ends[-1] = len(ids)
    made, begin = [], 0
    for index, end in enumerate(ends):
        tokens = tuple(ids[begin:end])
        logprobs = tuple(TokenLogprobs(-float(token_id), ()) for token_id in tokens)
        last = reason if index == len(ends) - 1 else None
        made.append(Run(REQUEST, tokens, (TokenKind.BONUS,) * len(tokens), 0, True, last, logprobs))
        begin = end
    return made


def take(leaving: Leaving, run: Run) -> tuple[list[LeftToken], int]:
    left, taken = leaving.take(run)
    rows = zip(left.token_ids, left.kinds, left.texts, left.logprobs, strict=True)
    return [LeftToken(*row) for row in rows], taken


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The text's tokens: its bytes, cut at some places."""
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


def first_stop(text: str, stops: list[str], *, includes_stop: bool) -> int | None:
    """Where the text ends: the slow way, one more character after the other."""
    for length in range(len(text) + 1):
        found = [length - len(stop) for stop in stops if text[:length].endswith(stop)]
        if found:
            return length if includes_stop else min(found)
    return None


texts = st.text(alphabet="ab é✓", min_size=1, max_size=14)


@settings(deadline=None)
@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab é✓", min_size=1, max_size=3), max_size=3),
    places=st.lists(st.integers(0, 40), max_size=20),
    rounds=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    reason=st.sampled_from(list(FinishReason)),
    includes_stop=st.booleans(),
)
def test_ids_end_where_the_text_does(
    text: str, stops: list[str], places: list[int], rounds: list[int], reason: FinishReason, includes_stop: bool
) -> None:
    pieces = cut(text.encode(), places)
    lengths: list[int] = []
    while sum(lengths) < len(pieces):
        lengths.append(min(rounds[len(lengths)], len(pieces) - sum(lengths)))
    detokenizer = Detokenizer(dict(enumerate(pieces)).__getitem__, {END})
    leaving = Leaving(detokenizer, tuple(stops), includes_stop=includes_stop)
    left: list[LeftToken] = []
    taken = 0
    for run in runs(lengths, reason):
        some, count = take(leaving, run)
        left += some
        taken += count
        assert text.startswith("".join(token.text for token in left))
        if leaving.is_stopped:
            break
    end = first_stop(text, stops, includes_stop=includes_stop)
    assert leaving.is_stopped == (end is not None)
    assert "".join(token.text for token in left) == text[:end]
    ids = list(range(len(pieces))) + ([END] if reason is FinishReason.STOP else [])
    if end is not None:  # exactly the tokens with a byte of the text that is kept
        bytes_kept = len(text[:end].encode())
        ids = [i for i in range(len(pieces)) if sum(map(len, pieces[:i])) < bytes_kept]
    assert [token.id for token in left] == ids
    assert [token.logprobs for token in left] == [TokenLogprobs(-float(i), ()) for i in ids]
    assert leaving.dropped == taken - len(ids)


def test_tokens_wait_only_as_long_as_their_text_could_belong_to_a_stop_text() -> None:
    pieces = dict(enumerate([b" ha", b" ha", b" he", b" ha", b" ha", b" ha"]))
    leaving = Leaving(Detokenizer(pieces.__getitem__, {END}), (" ha ha ha",))
    left = [[token.id for token in take(leaving, run)[0]] for run in runs([1] * 6, FinishReason.LENGTH)]
    assert left == [[], [], [0, 1, 2], [], [], []]
    assert leaving.is_stopped
    assert leaving.dropped == 3


def test_an_end_token_leaves_behind_what_waited_for_it() -> None:
    leaving = Leaving(Detokenizer({0: b"a", 1: b" ha"}.__getitem__, {END}), (" ha ha",))
    left, taken = take(leaving, runs([2], FinishReason.STOP)[0])
    assert [(token.id, token.text) for token in left] == [(0, "a"), (1, " ha"), (END, "")]
    assert taken == 3
    assert not leaving.is_stopped


def test_half_a_character_at_the_end_comes_with_its_token() -> None:
    for stops in ((), ("x",)):
        leaving = Leaving(Detokenizer({0: b"a", 1: b"\xc3"}.__getitem__, {END}), stops)
        left, _ = take(leaving, runs([2], FinishReason.LENGTH)[0])
        assert [(token.id, token.text) for token in left] == [(0, "a"), (1, "�")]


def test_before_min_tokens_a_stop_text_is_text() -> None:
    pieces = dict(enumerate([b"x", b"x", b"a", b"x"]))
    leaving = Leaving(Detokenizer(pieces.__getitem__, {END}), ("x",), min_tokens=2)
    left, taken = take(leaving, runs([4], FinishReason.LENGTH)[0])
    assert "".join(token.text for token in left) == "xxa"
    assert (taken, leaving.is_stopped) == (4, True)


NAME = 1001  # a special token, which gives no text


@settings(deadline=None)
@given(
    tokens=st.lists(st.sampled_from(["a", "b", "é", "ba", NAME]), min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["<s>", "a<s>", "<s>b", "<s><s>", "ba", "é<s>a"]), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_a_stop_text_may_name_a_special_token(tokens: list[str | int], stops: list[str], size: int) -> None:
    """It is looked for as if the name were text; the name itself never leaves."""
    named = {NAME: "<s>"} if any("<s>" in stop for stop in stops) else {}
    pieces = {i: token.encode() for i, token in enumerate(tokens) if isinstance(token, str)}
    ids = [NAME if token == NAME else i for i, token in enumerate(tokens)]
    leaving = Leaving(Detokenizer(pieces.__getitem__, {END, NAME}), tuple(stops), named=named)
    text, left = "", []
    for begin in range(0, len(ids), size):
        some = tuple(ids[begin : begin + size])
        reason = FinishReason.LENGTH if begin + size >= len(ids) else None
        found, _ = leaving.take(Run(REQUEST, some, (TokenKind.BONUS,) * len(some), 0, True, reason))
        text, left = text + "".join(found.texts), [*left, *found.token_ids]
        if leaving.is_stopped:
            break
    read = "".join(named.get(NAME, "") if token == NAME else str(token) for token in tokens)
    end = first_stop(read, stops, includes_stop=False)
    assert leaving.is_stopped == (end is not None)
    assert text == read[:end].replace("<s>", "")
    assert end is not None or left == ids


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_the_text_of_a_stop_token_leaves_where_it_is_asked_for(stops: tuple[str, ...]) -> None:
    pieces = {0: b"a", 1: b"\xc3", END: b"<end>"}
    [run] = runs([2], FinishReason.STOP)
    for hidden, end in ((set[int](), "<end>"), ({END}, "")):
        leaving = Leaving(Detokenizer(pieces.__getitem__, hidden), stops, includes_stop=True)
        left, taken = take(leaving, run)
        assert [token.id for token in left] == [0, 1, END]
        assert "".join(token.text for token in left) == "a\ufffd" + end
        assert left[-1].text.endswith(end)
        assert taken == 3
