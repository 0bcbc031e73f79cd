"""The tokenizer hash is equal for models that speak the same tokens, and differs otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import byte_tokenizer, word_tokenizer, write_tokenizer
from tokenizers import models, normalizers, processors

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.tokenizer_hash import load_tokenizer, tokenizer_hash, tokenizer_vocab_size


def test_the_same_tokenizer_in_another_folder_has_the_same_hash(tmp_path: Path) -> None:
    first, second = (write_tokenizer(tmp_path / name, byte_tokenizer()) for name in "ab")
    assert tokenizer_hash(first) == tokenizer_hash(second)
    assert len(tokenizer_hash(first)) == 64


def test_another_vocabulary_merge_or_normaliser_changes_the_hash(tmp_path: Path) -> None:
    lower = byte_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    fewer_merges = byte_tokenizer()
    fewer_merges.model = models.BPE(byte_tokenizer().get_vocab(), [])
    added = byte_tokenizer()
    added.add_special_tokens(["<|tool|>"])
    variants = [byte_tokenizer(), lower, fewer_merges, added, word_tokenizer(280)]
    hashes = {tokenizer_hash(write_tokenizer(tmp_path / str(i), variant)) for i, variant in enumerate(variants)}
    assert len(hashes) == len(variants)


def test_what_is_put_around_a_text_does_not_count(tmp_path: Path) -> None:
    framed = byte_tokenizer()
    framed.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    framed.enable_truncation(4)
    framed.enable_padding(length=64)
    plain = write_tokenizer(tmp_path / "plain", byte_tokenizer())
    assert tokenizer_hash(write_tokenizer(tmp_path / "framed", framed)) == tokenizer_hash(plain)
    assert len(load_tokenizer(tmp_path / "framed").encode("a longer text").ids) > 4


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(20)
    assert tokenizer_vocab_size(write_tokenizer(tmp_path / "a", tokenizer)) == 20
    tokenizer.add_tokens(["extra"])
    assert tokenizer_vocab_size(write_tokenizer(tmp_path / "b", tokenizer)) == 21


def test_missing_and_broken_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"tokenizer\.json does not exist"):
        tokenizer_hash(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_hash(tmp_path)
