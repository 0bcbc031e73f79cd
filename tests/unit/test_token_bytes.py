"""Bytes of tokens of every family: text, log probabilities and grammars are made of the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_tokenizer
from tiny_tokenizers import ADDED, CORPUS, END, FAMILIES, SPECIALS
from tokenizers import Tokenizer as FastTokenizer

from orchestrator.tokenizer import Tokenizer
from pilotfish.runtime.grammar import Grammars
from pilotfish.steps import Grammar, GrammarKind
from pilotfish.token_bytes import TokenBytes

LOSSLESS = ("byte_level", "gemma", "characters")
"""Families that give back what they took, whatever stands beside an added token."""


@pytest.fixture(scope="module")
def fast() -> dict[str, FastTokenizer]:
    return {name: build() for name, build in FAMILIES.items()}


@pytest.fixture(scope="module")
def folders(fast: dict[str, FastTokenizer], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_tokenizer(root / name, tokenizer) for name, tokenizer in fast.items()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_streamed_text_is_the_bytes_of_its_tokens(
    tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    """Whatever the tokens: broken UTF-8, special tokens in between, ids beyond the vocabulary."""
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12))
    detokenizer = tokenizer.detokenizer()
    text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    shown = [token_id for token_id in ids if not tokenizer.is_hidden(token_id)]
    assert text == b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", [*CORPUS, "the <think> café, the čaj doesn't", "  two  spaces ", "東京 🐟 e\u0301"])
def test_text_is_that_of_the_library(
    fast: dict[str, FastTokenizer], tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    """But for added tokens of byte-level BPE, which the library reads as other bytes, and a space at the very end."""
    if name == "byte_level":
        text = text.replace("café", "cafe").replace("čaj", "caj")
    ids = tokenizers[name].encode(text)
    for skipped in (True, False):
        found = tokenizers[name].decode(ids, skip_special_tokens=skipped)
        expected = fast[name].decode(ids, skip_special_tokens=skipped)
        assert found == expected + " " * (name == "suffixes" and found.endswith(" "))


@pytest.mark.parametrize("name", LOSSLESS)
def test_added_tokens_come_out_as_they_went_in(tokenizers: dict[str, Tokenizer], name: str) -> None:
    text = f"the{ADDED[0]} in {ADDED[1]}s {ADDED[2]}"
    ids = tokenizers[name].encode(text)
    assert [tokenizers[name].token_bytes(token_id) for token_id in ids if token_id >= 0].count("čaj".encode()) == 1
    assert tokenizers[name].decode(ids) == text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_and_its_completion_are_one_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """Wherever the prompt ends, its completion begins as it goes on, with the space in front of a word."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(CORPUS[1], add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        detokenizer = tokenizer.detokenizer()
        prompt = "".join(tokenizer.prompt_texts(ids[:cut], is_text=False))
        assert prompt + "".join(map(detokenizer.push, ids[cut:])) == whole


def test_special_tokens_are_known_by_name(fast: dict[str, FastTokenizer]) -> None:
    for tokenizer in fast.values():
        assert TokenBytes(tokenizer).special == dict(enumerate(SPECIALS))


# Grammars

TEXTS = (
    '{"city": "café", "n": 4}',
    '{"city":"čaj","n":42}',
    ' { " city " : "x" }',
    '{"n": 4}',
    ' {"n": 4}',
    "naïve",
)
"""A language of few texts, so that what may follow can be told by looking at each."""
RULES = "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in TEXTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_lets_follow_what_its_texts_go_on_with(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], name: str
) -> None:
    """At every place that tokens lead to; and some tokens lead to an end."""
    grammars, tokenizer = Grammars(folders[name], waits=True), tokenizers[name]
    grammar, language = Grammar(GrammarKind.EBNF, RULES, (END,)), [text.encode() for text in TEXTS]
    tokens = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if not tokenizer.is_hidden(i)}
    places: list[tuple[list[int], bytes]] = [([], b"")]
    seen, complete = {b""}, set()
    while places:
        path, begun = places.pop()
        masks = grammars.masks(grammar, np.array(path, np.int32), [[]])
        assert masks is not None
        allowed = {i for i, data in tokens.items() if data and any(text.startswith(begun + data) for text in language)}
        assert set(np.flatnonzero(masks[0]).tolist()) == allowed | ({END} if begun in language else set())
        complete |= {begun} & set(language)
        for token_id in allowed:
            if (longer := begun + tokens[token_id]) not in seen:
                seen.add(longer)
                places.append(([*path, token_id], longer))
    assert complete


def test_json_can_be_written_in_pieces_of_words(folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    """WordPiece, whose ``##x`` go on a word: read as text, no grammar would ever match."""
    tokenizer, grammars = tokenizers["wordpiece"], Grammars(folders["wordpiece"], waits=True)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), (END,))
    pieces = {tokenizer.token_bytes(i).decode(): i for i in range(tokenizer.vocab_size)}
    path = [pieces[character] for character in '{"city":"Rome']
    path += [pieces[" the"], pieces['"'], pieces["}"]]
    masks = grammars.masks(grammar, np.array([], np.int32), [path[:count] for count in range(len(path) + 1)])
    assert masks is not None
    assert all(masks[node, token] for node, token in enumerate(path))
    assert np.flatnonzero(masks[-1]).tolist() == [END]
