"""Text, ids and log probabilities end together, however text falls into tokens and tokens into rounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason
from orchestrator.core.requests import Params, Request, TokenLogprobs
from orchestrator.core.rounds import Run
from orchestrator.detokenizer import Detokenizer
from orchestrator.leaving import Leaving, LeftToken

REQUEST = Request("r", np.array([1], np.int32), Params(max_tokens=100))
TOKENIZER = byte_tokenizer()
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


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text ends: the slow way, one more character after the other."""
    for length in range(len(text) + 1):
        found = [length - len(stop) for stop in stops if text[:length].endswith(stop)]
        if found:
            return min(found)
    return None


texts = st.text(alphabet="ab é✓", min_size=1, max_size=14)


@settings(deadline=None)
@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab é✓", min_size=1, max_size=3), max_size=3),
    places=st.lists(st.integers(0, 40), max_size=20),
    rounds=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    reason=st.sampled_from(list(FinishReason)),
)
def test_ids_end_where_the_text_does(
    text: str, stops: list[str], places: list[int], rounds: list[int], reason: FinishReason
) -> None:
    pieces = cut(text.encode(), places)
    lengths: list[int] = []
    while sum(lengths) < len(pieces):
        lengths.append(min(rounds[len(lengths)], len(pieces) - sum(lengths)))
    leaving = Leaving(Detokenizer(TOKENIZER, {END}, dict(enumerate(pieces))), tuple(stops))
    left: list[LeftToken] = []
    taken = 0
    for run in runs(lengths, reason):
        some, count = take(leaving, run)
        left += some
        taken += count
        assert text.startswith("".join(token.text for token in left))
        if leaving.is_stopped:
            break
    end = first_stop(text, stops)
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
    leaving = Leaving(Detokenizer(TOKENIZER, {END}, pieces), (" ha ha ha",))
    left = [[token.id for token in take(leaving, run)[0]] for run in runs([1] * 6, FinishReason.LENGTH)]
    assert left == [[], [], [0, 1, 2], [], [], []]
    assert leaving.is_stopped
    assert leaving.dropped == 3


def test_an_end_token_leaves_behind_what_waited_for_it() -> None:
    leaving = Leaving(Detokenizer(TOKENIZER, {END}, {0: b"a", 1: b" ha"}), (" ha ha",))
    left, taken = take(leaving, runs([2], FinishReason.STOP)[0])
    assert [(token.id, token.text) for token in left] == [(0, "a"), (1, " ha"), (END, "")]
    assert taken == 3
    assert not leaving.is_stopped


def test_half_a_character_at_the_end_comes_with_its_token() -> None:
    for stops in ((), ("x",)):
        leaving = Leaving(Detokenizer(TOKENIZER, {END}, {0: b"a", 1: b"\xc3"}), stops)
        left, _ = take(leaving, runs([2], FinishReason.LENGTH)[0])
        assert [(token.id, token.text) for token in left] == [(0, "a"), (1, "�")]


def test_before_min_tokens_a_stop_text_is_text() -> None:
    pieces = dict(enumerate([b"x", b"x", b"a", b"x"]))
    leaving = Leaving(Detokenizer(TOKENIZER, {END}, pieces), ("x",), min_tokens=2)
    left, taken = take(leaving, runs([4], FinishReason.LENGTH)[0])
    assert "".join(token.text for token in left) == "xxa"
    assert (taken, leaving.is_stopped) == (4, True)
