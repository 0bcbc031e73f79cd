"""Ablations of a head: text that a slow twin wrote, accepting what it was told to, gives back just that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from ablations import Outcome, Text, Variant, markdown, measure, variants
from safetensors.torch import load_file
from tiny_heads import FORMATS, HIDDEN, VOCAB, Twin
from torch import Tensor

from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_path
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.weights import weights_hash
from pilotfish.tokenizer_hash import tokenizer_hash

LENGTH = 3
STATES = {"hidden.2": slice(0, HIDDEN), "final": slice(HIDDEN, 2 * HIDDEN)}
PLAN = (2, 0, 3, 1, 3, 3, 2)  # draft tokens to be accepted round by round


def write_text(
    twin: Twin, states: Tensor, prompt: list[int], plan: Iterator[int], *, rebuild: bool
) -> tuple[list[int], list[int]]:
    """Writes text of which each round gets as many draft tokens right as planned.

    Args:
        twin: the head.
        states: true ones, f32[tokens, hidden]; as many tokens are written.
        prompt: two tokens or more.
        plan: draft tokens to accept.
        rebuild: whether kept draft tokens get their true states.

    Returns:
        The text, and what was accepted in the rounds whose whole chain it can judge.
    """
    text, accepted, held = list(prompt), [], []
    while len(text) + LENGTH <= len(states):
        slots = len(text) - 1
        held += states[len(held) : slots]
        row, tokens, drafted = list(held), text[1:], []
        for step in range(LENGTH):
            logits, state = twin.run(row, tokens, step)
            drafted.append(int(twin.ids[logits.argmax()]))
            row.append(state)
            tokens.append(drafted[-1])
        accepted.append(next(plan))
        wrong = (drafted[accepted[-1]] + 1) % VOCAB if accepted[-1] < LENGTH else 7
        text += [*drafted[: accepted[-1]], wrong]
        if not rebuild:
            held += row[slots : slots + min(accepted[-1], LENGTH - 1)]
    return (text + [0] * LENGTH)[: len(states)], accepted


def captured(folder: Path, target: Path, documents: Sequence[CapturedDocument]) -> Path:
    """A folder that holds the documents out, and others not."""
    folder.mkdir()
    rest = CapturedDocument(torch.zeros(9, dtype=torch.int32), 2, 0.0, torch.zeros(9, 2 * HIDDEN).bfloat16())
    all_of_them = [each for document in documents for each in [rest] * 19 + [document]]
    shard = Shard.of(all_of_them)
    manifest = Manifest("tiny", weights_hash(target), tokenizer_hash(target), tuple(STATES), HIDDEN, "float32", {})
    shard.write(shard_path(folder, 0))
    manifest.counting(shard, is_whole=True).write(folder)
    return folder


def reached(accepted: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(each >= i for each in accepted) for i in range(LENGTH + 1))


@pytest.mark.parametrize("name", [variant.name for variant in variants(Path(), {})])
@pytest.mark.parametrize("head", ["own", "own-two-layers"])
def test_each_variant_accepts_what_its_twin_wrote(
    head: str, name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target, written = model_folder("llama"), FORMATS[head]
    rows = {variant.name: variant for variant in variants(written.write(tmp_path / "head"), {})}
    ours = rows[name]
    twin = Twin(replace(written, post_norm="feedback" not in ours.switches), load_file(target / "model.safetensors"))
    random, plan, documents, accepted = torch.Generator().manual_seed(1), cycle(PLAN), [], []
    for length in (33, 14, 27):
        features = torch.randn(length, 2 * HIDDEN, generator=random).bfloat16()
        read = features[:, STATES["hidden.2" if "h_source" in ours.switches else "final"]].float()
        text, rounds = write_text(twin, read, [5, 9, length], plan, rebuild=ours.rebuild)
        documents.append(CapturedDocument(torch.tensor(text, dtype=torch.int32), 2, 0.0, features))
        accepted += rounds
    folder = captured(tmp_path / "data", target, [*documents, replace(documents[0], temperature=1.0)])
    found = Text.read(folder, target)
    assert [each.token_ids.tolist() for each in found.documents] == [each.token_ids.tolist() for each in documents]
    outcomes = {
        other: measure(variant, target, found, length=LENGTH, rows=2, dtype="float32")
        for other, variant in rows.items()
    }
    assert outcomes[name].reached == reached(accepted)
    assert outcomes[name].tokens_per_round == pytest.approx(1 + sum(accepted) / len(accepted))
    for other, outcome in outcomes.items():
        assert (outcome.reached == outcomes[name].reached) == (other == name), other


def test_what_does_not_belong_together_is_refused(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    target, head = model_folder("llama"), FORMATS["own"].write(tmp_path / "head")
    document = CapturedDocument(torch.zeros(9, dtype=torch.int32), 2, 0.0, torch.zeros(9, 2 * HIDDEN).bfloat16())
    folder = captured(tmp_path / "data", target, [document])
    with pytest.raises(FailedPreconditionError, match="not of the target in"):
        Text.read(folder, model_folder("qwen3"))
    with pytest.raises(InvalidArgumentError, match="holds out no document of temperature 0"):
        Text.read(captured(tmp_path / "drawn", target, [replace(document, temperature=1.0)]), target)
    assert len(Text.read(folder, target, held_out=False).documents) == 20
    text = Text.read(folder, target)
    with pytest.raises(InvalidArgumentError, match="length is 8"):
        measure(Variant("as served", head), target, text, length=8, rows=1, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="must be a head"):
        measure(Variant("as served", target), target, text, length=2, rows=1, dtype="float32")
    other = replace(text, manifest=replace(text.manifest, tokenizer_hash="other"))
    with pytest.raises(FailedPreconditionError, match="other tokens than tiny"):
        measure(Variant("as served", head), target, other, length=2, rows=1, dtype="float32")


def test_the_table_holds_variants_against_the_first() -> None:
    lines = markdown({"as served": Outcome((10, 6, 3, 1)), "without rebuild": Outcome((12, 4, 0, 0))}).splitlines()
    assert lines == [
        "|  | 1 | 2 | 3 | tokens per round |  | rounds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| as served | 0.600 | 0.500 | 0.333 | **2.000** |  | 10 |",
        "| without rebuild | 0.333 | 0.000 | 0.000 | **1.333** | -33.3% | 12 |",
    ]


def test_other_heads_are_further_rows() -> None:
    found = variants(Path("head"), {"norms none": "none"})
    assert found[-1] == Variant("norms none", Path("none"))
    assert all(variant.head == Path("head") for variant in found[:-1])
