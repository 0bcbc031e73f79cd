"""Shaped logits against a slow twin, which takes one node at a time and walks its history token by token, and against
Hugging Face's own processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Row, Shape, ints, sampling_rows, shaping_rows, token_rows
from shaped import shaped_slowly
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime import sampling
from pilotfish.runtime.grammar import Grammars
from pilotfish.runtime.shaping import Shaper, read_history
from pilotfish.runtime.slots import path_to
from pilotfish.steps import Grammar, GrammarKind, ShapingRows

VOCAB = 12
NO_GRAMMARS = Grammars(Path("nowhere"), waits=True)


def shaper(
    shape: Shape | ShapingRows, histories: Sequence[Sequence[int]], *, ahead: int = 0, columns: Tensor | None = None
) -> Shaper:
    rows = shape if isinstance(shape, ShapingRows) else shaping_rows(shape)
    lengths = np.array([len(history) - ahead for history in histories], np.int64)
    return Shaper(rows, lengths, lambda row: ints(*histories[row][ahead:]), NO_GRAMMARS, ahead=ahead, columns=columns)


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
SHAPES = st.builds(
    Shape,
    row=st.just(0),
    prompt_length=st.integers(1, 12),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    presence=st.sampled_from([0.0, -1.5, 2.0]),
    frequency=st.sampled_from([0.0, -1.5, 2.0]),
    biases=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-math.inf, -3.0, 2.5])),
    allowed=st.one_of(st.just(()), st.lists(st.integers(0, VOCAB + 3), min_size=1)),
    min_tokens=st.integers(0, 6),
    ends=st.lists(st.integers(0, VOCAB + 3), max_size=3),
)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(st.integers(0, VOCAB - 1), min_size=1), SHAPES, st.data())
@settings(max_examples=200, deadline=None)
def test_every_node_is_shaped_by_its_own_history(
    paths: list[list[int]], cached: list[int], shape: Shape, data: st.DataObject
) -> None:
    """With all columns and with some in any order, and a first token that a head lacks."""
    columns = data.draw(st.one_of(st.none(), st.permutations(range(VOCAB)).map(lambda ids: torch.tensor(ids[:7]))))
    ahead = data.draw(st.sampled_from([0, 1]))
    full = torch.randn(len(paths), VOCAB, generator=torch.Generator().manual_seed(len(cached)))
    logits = full.clone() if columns is None else full[:, columns]
    raw = logits.clone()
    empty = shaper(shape, [cached], ahead=ahead, columns=columns)(
        logits, np.zeros(len(paths), np.int64), paths.__getitem__
    )
    for node, path in enumerate(paths):
        # What a head does not know of has been nowhere, but counts.
        known = [-1 if ahead and not i else token for i, token in enumerate(cached)]
        wanted = torch.tensor(shaped_slowly(full[node].tolist(), known + path, shape))
        wanted = wanted if columns is None else wanted[columns]
        if bool((wanted == -torch.inf).all()):
            assert node in empty
            wanted = raw[node]
        else:
            assert node not in empty
        torch.testing.assert_close(logits[node], wanted)


def test_rows_that_ask_for_nothing_keep_their_logits() -> None:
    shapes = shaping_rows(Shape(1, repetition=2.0), Shape(3, biases={4: -math.inf}))
    histories = [[1, 2]] * 4
    logits = torch.randn(6, VOCAB)
    raw, rows = logits.clone(), np.array([0, 1, 1, 2, 3, 0])
    shape = shaper(shapes, histories)
    shape(logits, rows, lambda node: [node])
    assert torch.equal(logits[[0, 3, 5]], raw[[0, 3, 5]])
    assert not torch.equal(logits[[1]], raw[[1]])
    assert not torch.equal(logits[[2]], raw[[2]])
    assert logits[4, 4] == -torch.inf
    assert not shape.shapes(np.array([0, 2]))
    assert shape.shapes(np.array([0, 3]))


def test_histories_are_read_once_and_only_for_penalties() -> None:
    read: list[int] = []

    def note(row: int) -> Any:
        read.append(row)
        return ints(3, 4)

    shapes = shaping_rows(Shape(0, frequency=1.0), Shape(1, min_tokens=9, ends=[2]), Shape(2, presence=1.0))
    shape = Shaper(shapes, np.full(3, 2), note, NO_GRAMMARS)
    for _ in range(3):
        shape(torch.randn(3, VOCAB), np.array([0, 1, 0]), lambda node: [node])
    assert read == [0]


@pytest.mark.parametrize("penalty", [0.7, 1.2, 5.0])
def test_the_repetition_penalty_is_hugging_faces(penalty: float) -> None:
    history, logits = [3, 3, 7, 1], torch.randn(1, VOCAB)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*history, 5]]), logits.clone())
    shaper(Shape(0, repetition=penalty), [history])(logits, np.array([0]), lambda _: [5])
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 3e38])
def test_a_penalty_out_of_all_proportion_leaves_a_law(penalty: float) -> None:
    logits = torch.tensor([[2.0, -3.0, 1.0, 0.0, -math.inf]])
    shaper(Shape(0, repetition=penalty), [[0, 1, 4]])(logits, np.array([0]), lambda _: [])
    p = sampling.probabilities(logits, sampling_rows(1))
    assert float(p.sum()) == pytest.approx(1)
    assert int(logits.argmax()) == (0 if penalty < 1 else 2)
    assert p[0, 4] == 0


def test_biases_come_before_the_penalty_as_in_hugging_face() -> None:
    history, logits = [3, 3, 7, 1], torch.zeros(1, VOCAB)
    ids = torch.tensor([history])
    bias = SequenceBiasLogitsProcessor([[[3], 2.0], [[7], -2.0], [[9], -math.inf]])
    wanted = RepetitionPenaltyLogitsProcessor(1.5)(ids, bias(ids, logits.clone()))
    shape = Shape(0, repetition=1.5, biases={3: 2.0, 7: -2.0, 9: -math.inf})
    shaper(shape, [history])(logits, np.array([0]), lambda _: [])
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("length", range(3, 7))
def test_min_tokens_are_hugging_faces_min_new_tokens(length: int) -> None:
    history, logits = [5] * length, torch.randn(1, VOCAB)
    process = MinNewTokensLengthLogitsProcessor(3, 2, [2, 4], device="cpu")  # type: ignore[arg-type]
    wanted = process(torch.tensor([history]), logits.clone())
    shape = Shape(0, prompt_length=3, min_tokens=2, ends=[2, 4])
    shaper(shape, [history[:2]])(logits, np.array([0]), lambda _: history[2:])
    assert torch.equal(logits, wanted)


def test_a_node_without_a_token_left_is_named_and_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    raw = logits.clone()
    shape = Shape(0, allowed=[2, 3], biases={3: -math.inf}, min_tokens=2, ends=[2])
    empty = shaper(shape, [[1]])(logits, np.array([0, 0]), lambda node: [5] * (node + 1))
    assert empty.tolist() == [0]
    assert torch.equal(logits[0], raw[0])
    assert logits[1].argmax() == 2


def test_a_history_is_read_along_the_page_table() -> None:
    token_ids = torch.arange(5 * 4, dtype=torch.int32).view(5, 4)
    rows = token_rows(Row([1], 3, [2]), Row([1, 1], 7, [4, 0, 1]))
    assert read_history(token_ids, rows, 0, 3).tolist() == [8, 9, 10]
    assert read_history(token_ids, rows, 1, 7).tolist() == [16, 17, 18, 19, 0, 1, 2]
    assert read_history(token_ids, rows, 1, 0).tolist() == []


def test_the_path_to_a_token_follows_its_parents() -> None:
    chains = token_rows(Row([9, 8], 0, [0]), Row([1, 2, 3], 4, [1]))
    assert path_to(chains, 1, 4) == [1, 2, 3]
    assert path_to(chains, 0, 0) == [9]
    trees = token_rows(Row([9, 8], 0, [0]), Row([1, 2, 3, 4], 4, [1], parents=[-1, 0, 0, 2]))
    assert path_to(trees, 1, 5) == [1, 3, 4]
    assert path_to(trees, 1, 3) == [1, 2]


GRAMMAR = Grammar(GrammarKind.REGEX, "a", (2,))
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("length of grammar_indices is 2; must equal the 0", {"grammar_indices": ints(0, 0)}),
    ("length of grammar_indices is 0; must equal the 2", {"grammars": (GRAMMAR,)}),
    (r"grammar_indices\[1\] is 1; must be in \[-1, 0\]", {"grammars": (GRAMMAR,), "grammar_indices": ints(-1, 1)}),
    ("rows is empty", {"rows": ints()}),
    (r"rows\[1\] is 2; must be in \[0, 2\)", {"rows": ints(0, 2)}),
    ("rows is not ascending", {"rows": ints(1, 0)}),
    ("length of prompt_lengths is 1; must equal the 2 rows", {"prompt_lengths": ints(1)}),
    (r"prompt_lengths\[0\] is 0", {"prompt_lengths": ints(0, 1)}),
    (r"repetition_penalties\[1\] is 0.0; must be finite and > 0", {"repetition_penalties": np.float32([1, 0])}),
    (r"presence_penalties\[0\] is nan", {"presence_penalties": np.float32([np.nan, 0])}),
    (r"frequency_penalties\[0\] is inf", {"frequency_penalties": np.float32([np.inf, 0])}),
    (r"min_tokens\[0\] is -1", {"min_tokens": ints(-1, 0)}),
    (r"bias_counts\[0\] is -1", {"bias_counts": ints(-1, 3)}),
    ("length of bias_token_ids is 2; bias_counts sum to 3", {"bias_counts": ints(1, 2)}),
    ("length of bias_values is 1; must equal the 2", {"bias_values": np.float32([1])}),
    (r"bias_values\[0\] is inf; must be finite, or -inf", {"bias_values": np.float32([np.inf, 1])}),
    ("bias_token_ids is repeated", {"bias_token_ids": ints(5, 5)}),
    (r"bias_token_ids\[0\] is -5", {"bias_token_ids": ints(-5, 5)}),
    ("length of allowed_token_ids is 1; allowed_counts sum to 0", {"allowed_token_ids": ints(1)}),
    ("length of end_token_ids is 0; end_counts sum to 1", {"end_counts": ints(0, 1)}),
]


@pytest.mark.parametrize(("message", "change"), FAULTS)
def test_rows_that_break_the_contract_are_refused_by_name(message: str, change: dict[str, Any]) -> None:
    sound = shaping_rows(Shape(0, biases={5: 1.0, 6: -math.inf}), Shape(1))
    sound.validate(2)
    with pytest.raises(InvalidArgumentError, match=message):
        replace(sound, **change).validate(2)
