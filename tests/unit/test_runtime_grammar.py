"""Masks of grammars against a slow twin: a token may follow exactly if some text of the grammar begins with the text so
far and the token's."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import ints
from tiny_models import EOS_ID, SPECIALS, byte_tokenizer, write_tokenizer

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime import grammar as module
from pilotfish.runtime.grammar import Grammars
from pilotfish.steps import Grammar, GrammarKind

TOKENIZER = byte_tokenizer()
PIECES = {i: TOKENIZER.decode([i]) for i in range(len(SPECIALS), TOKENIZER.get_vocab_size())}
WORDS = ["".join(word) for length in range(5) for word in product("ab", repeat=length)]
EXPRESSION = "(a|bb){1,3}"
TEXTS = [word for word in WORDS if re.fullmatch(EXPRESSION, word)] + ["bb" * 3, "abbbb", "bbabb", "bbbba"]


def regex(text: str = EXPRESSION) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, (EOS_ID,))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TOKENIZER)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, waits=True)


def twin(tokens: Sequence[int]) -> set[int]:
    if not all(token in PIECES for token in tokens):
        return set()  # a special token, or one behind the end
    text = "".join(PIECES[token] for token in tokens)
    follows = {token for token, piece in PIECES.items() if any(t.startswith(text + piece) for t in TEXTS)}
    return follows | ({EOS_ID} if text in TEXTS else set())


def decodes(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


AB = st.sampled_from([*ids("a"), *ids("b"), *ids("b"), *ids("c"), EOS_ID, 3])


@given(st.lists(AB, max_size=4), st.lists(st.lists(AB, max_size=4), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_every_node_has_the_mask_of_its_own_path(
    grammars: Grammars, completion: list[int], paths: list[list[int]]
) -> None:
    masks = grammars.masks(regex(), ints(*completion), paths)
    assert masks is not None
    for mask, path in zip(masks, paths, strict=True):
        assert set(np.flatnonzero(mask).tolist()) == twin(completion + path)


@given(st.lists(st.lists(st.sampled_from([ids("a")[0], ids("b")[0]]), max_size=6), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_rows_in_any_order_find_their_places_or_make_them_anew(folder: Path, completions: list[list[int]]) -> None:
    """Matchers are a cache: of two, most are lost, and nothing changes."""
    small = Grammars(folder, waits=True)
    small._matchers = module._Recent(2)
    for completion in completions:
        masks = small.masks(regex(), ints(*completion), [[]])
        assert masks is not None
        assert set(np.flatnonzero(masks[0]).tolist()) == twin(completion)


def test_a_completion_that_breaks_its_grammar_harms_no_other(grammars: Grammars) -> None:
    good, broken = ids("a"), ids("a") + ids("c") + ids("a")
    for _ in range(3):
        found = [grammars.masks(regex(), ints(*completion), [[]]) for completion in (good, broken, good)]
        assert [int(mask.sum()) for mask in found if mask is not None] == [len(twin(good)), 0, len(twin(good))]


def test_a_matcher_that_fails_on_its_way_is_not_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(folder, waits=True)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fail)
        masks = grammars.masks(regex(), ints(*ids("a")), [ids("bbbb")])
        assert masks is not None
        assert not masks.any()
    masks = grammars.masks(regex(), ints(*ids("a")), [[]])
    assert masks is not None
    assert set(np.flatnonzero(masks[0]).tolist()) == twin(ids("a"))


def test_special_tokens_never_follow_but_the_end(grammars: Grammars) -> None:
    masks = grammars.masks(Grammar(GrammarKind.JSON_OBJECT, "", (EOS_ID,)), ints(*ids('{"a')), [[], ids('": 1}')])
    assert masks is not None
    assert not masks[0, : len(SPECIALS)].any()
    assert masks[0, ids("x")].all()
    assert set(np.flatnonzero(masks[1]).tolist()) == {EOS_ID}


def test_strings_of_limited_length_have_no_control_characters_either(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), (EOS_ID,))
    masks = grammars.masks(grammar, ints(*ids('{"a": "x')), [[]])
    assert masks is not None
    texts = [PIECES[token] for token in np.flatnonzero(masks[0]).tolist()]
    assert "y" in texts
    assert not [text for text in texts if text < " "]


@pytest.mark.parametrize("first", ["\u0800", "\ud7a3", "\U00010000", "\U00100000"], ids=ascii)
@pytest.mark.parametrize(
    ("kind", "text", "begun"),
    [
        ("REGEX", '"[^"]{0,3}"', '"'),
        ("JSON_SCHEMA", '{"type": "string"}', '"x'),
        ("JSON_SCHEMA", '{"type": "string", "pattern": "^[^b]{2}$"}', '"x'),
        ("JSON_OBJECT", "", '{"a": "'),
    ],
)
def test_texts_are_unicode(kind: str, text: str, begun: str, first: str, grammars: Grammars) -> None:
    """Of the bytes 0x80 to 0xBF, those that go on a character: behind some first bytes not all do."""
    going_on = {0x80 + i: ids(chr(0xC0 + i))[1] for i in range(0x40)}
    begin, *rest = ids(first)
    grammar = Grammar(GrammarKind[kind], text, (EOS_ID,))
    masks = [
        grammars.masks(grammar, ints(*ids(begun), begin), [[]]),
        grammars.masks(grammar, ints(*ids(begun)), [[begin]]),
        grammars.masks(grammar, ints(*ids(begun)), [[], ids("y"), [begin]]),
    ]
    lead, padding = first.encode()[:1], b"\x80" * (len(rest) - 1)
    twin = {token for byte, token in going_on.items() if decodes(lead + bytes([byte]) + padding)}
    assert 0 < len(twin) < 0x40
    for found in masks:
        assert found is not None
        assert set(np.flatnonzero(found[-1]).tolist()) == twin


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("JSON_OBJECT", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("JSON_SCHEMA", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a":7}', '{"b"'),
        ("REGEX", "[0-9]+(\\.[0-9]+)?", "3.14", "3."),
        ("EBNF", 'root ::= "x" rest\nrest ::= "y" | "z" rest', "xzzy", "xx"),
        (
            "STRUCTURAL_TAG",
            json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<f>"],
                        "tags": [{"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"}],
                    },
                }
            ),
            "so <f>7</f> it is",
            "so <f>x",
        ),
    ],
)
def test_every_kind_is_followed(kind: str, text: str, good: str, bad: str, grammars: Grammars) -> None:
    grammar = Grammar(GrammarKind[kind], text, (EOS_ID,))
    grammars.compile(grammar).result()
    masks = grammars.masks(grammar, ints(), [ids(good), ids(bad)])
    assert masks is not None
    assert masks[0, EOS_ID]
    assert not masks[1, EOS_ID]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("REGEX", "(("),
        ("REGEX", "(?=a)b"),
        ("JSON_SCHEMA", "{"),
        ("JSON_SCHEMA", '{"type": "nonsense"}'),
        ("EBNF", "root ::= "),
        ("EBNF", "x ::= [a]"),
        ("STRUCTURAL_TAG", '{"a": 1}'),
    ],
)
def test_what_is_no_grammar_is_refused_by_name_and_harms_its_own_row_alone(
    kind: str, text: str, grammars: Grammars
) -> None:
    bad = Grammar(GrammarKind[kind], text, (EOS_ID,))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=f"{kind.lower()} is no grammar that can be followed: .*[a-z]"):
            grammars.compile(bad).result()
    masks = grammars.masks(bad, ints(), [[], ids("a")])
    assert masks is not None
    assert not masks.any()
    found = grammars.masks(regex(), ints(), [[]])
    assert found is not None
    assert found.any()


def test_a_drafter_does_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, run = threading.Event(), module.Compilation.run
    monkeypatch.setattr(module.Compilation, "run", lambda self, *rest: may_go_on.wait() and run(self, *rest))
    drafter = Grammars(folder, waits=False)
    assert drafter.masks(regex("ab"), ints(), [[]]) is None
    may_go_on.set()
    drafter.compile(regex("ab")).result()
    masks = drafter.masks(regex("ab"), ints(), [[]])
    assert masks is not None
    assert set(np.flatnonzero(masks[0]).tolist()) == set(ids("a"))
