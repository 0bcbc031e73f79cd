"""Captured text on disk: what is written is read back, and what is damaged is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_path, shard_paths
from pilotfish.errors import InvalidArgumentError, NotFoundError

MANIFEST = Manifest("tiny", "weights", "tokens", ("hidden.1", "final"), 3, "float32", {"seed": 1})


def document(length: int, prompt_length: int, first: int) -> CapturedDocument:
    return CapturedDocument(
        token_ids=torch.arange(first, first + length, dtype=torch.int32),
        prompt_length=prompt_length,
        temperature=0.5,
        features=torch.full((length, 6), float(first), dtype=torch.bfloat16),
    )


@pytest.fixture
def shard() -> Shard:
    return Shard.of([document(4, 1, 10), document(2, 1, 20), document(5, 4, 30)])


def test_documents_come_back_as_they_were(tmp_path: Path, shard: Shard) -> None:
    shard.write(shard_path(tmp_path, 0))
    first, second, third = Shard.read(shard_path(tmp_path, 0), 6).split()
    assert first.token_ids.tolist() == [10, 11, 12, 13]
    assert (second.token_ids.tolist(), second.prompt_length) == ([20, 21], 1)
    assert third.features.unique().tolist() == [30.0]
    assert (third.prompt_length, third.temperature) == (4, 0.5)
    assert not list(tmp_path.glob("*.part"))


def test_a_manifest_counts_and_comes_back(tmp_path: Path, shard: Shard) -> None:
    manifest = MANIFEST.counting(shard, is_whole=True).counting(shard, is_whole=False)
    assert (manifest.shards, manifest.whole_shards, manifest.documents) == (2, 1, 6)
    assert (manifest.tokens, manifest.answer_tokens) == (22, 2 * (3 + 1 + 1))
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_columns_follow_the_names() -> None:
    assert MANIFEST.columns(["final", "hidden.1"]) == [3, 4, 5, 0, 1, 2]
    with pytest.raises(InvalidArgumentError, match=r"'hidden\.2' was not captured; there are hidden\.1, final"):
        MANIFEST.columns(["hidden.2"])


def test_missing_files_say_what_writes_them(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="train capture"):
        Manifest.read(tmp_path)
    with pytest.raises(NotFoundError, match="train capture"):
        shard_paths(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    replace(MANIFEST, format=99).write(tmp_path)
    with pytest.raises(InvalidArgumentError, match="format is 99"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"model_id": "x"}))
    with pytest.raises(InvalidArgumentError, match="must be an object of"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengths", torch.tensor([4, 2, 6], dtype=torch.int32), "token_ids has shape"),
        ("features", torch.zeros(11, 5, dtype=torch.bfloat16), r"features has shape \(11, 5\)"),
        ("features", torch.zeros(11, 6), "features is torch.float32"),
        ("temperatures", torch.zeros(2), "temperatures has shape"),
        ("prompt_lengths", torch.tensor([4, 1, 4], dtype=torch.int32), "prompt_lengths"),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, shard: Shard, name: str, value: torch.Tensor, message: str) -> None:
    path = shard_path(tmp_path, 0)
    shard.write(path)
    save_file(load_file(path) | {name: value}, path)
    with pytest.raises(InvalidArgumentError, match=message):
        Shard.read(path, 6)


def test_a_shard_cut_short_is_refused(tmp_path: Path, shard: Shard) -> None:
    path = shard_path(tmp_path, 0)
    shard.write(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidArgumentError, match="delete it and capture again"):
        Shard.read(path, 6)
