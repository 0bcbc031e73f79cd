"""Captured documents as batches to train and judge on.

A document of L tokens has the states h_0 .. h_{L-1}; the last one belongs to the token that ends the answer, is no
input to any draft, and may not have been captured. So h_{L-2} is the last state used, as an input and as a teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draft_svc.training.shards import HELD_OUT_EVERY, CapturedDocument, Manifest, Shard, is_held_out, shard_paths
from draft_svc.training.teacher import Teacher, TeacherRows
from pilotfish.errors import InvalidArgumentError

_BUCKET = 256  # documents that are sorted by length together: enough to pad little, few enough to stay random


@dataclass(frozen=True, slots=True)
class Document:
    """One captured document and what its teacher says.

    Attributes:
        captured: tokens and states.
        teacher: likeliest tokens behind every token.
        columns: of the states that the head reads.
        final: columns of the post-norm state.
    """

    captured: CapturedDocument
    teacher: TeacherRows
    columns: list[slice]
    final: slice

    @property
    def length(self) -> int:
        return len(self.captured.token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.captured.temperature == 0


class Corpus:
    """All documents of a folder, some of them held out.

    Args:
        folder: of shards.
        features: states that the head reads, by the names of types.proto.
        teacher: what is known of the target's distributions.

    Attributes:
        manifest: of the folder.
        train: documents to train on.
        held_out: every twentieth document, to judge on.
    """

    def __init__(self, folder: Path, features: Sequence[str], teacher: Teacher) -> None:
        self.manifest = Manifest.read(folder)
        # The post-norm state is the teacher, whatever the head reads.
        columns = [_columns(self.manifest, name) for name in features]
        final = _columns(self.manifest, "final")
        documents = [
            Document(captured, rows, columns, final)
            for path in shard_paths(folder)
            for captured, rows in _with_teacher(Shard.read(path, self.manifest.feature_width), teacher)
            if len(captured.token_ids) - captured.prompt_length >= 2
        ]
        self.train = [d for i, d in enumerate(documents) if not is_held_out(i)]
        self.held_out = [d for i, d in enumerate(documents) if is_held_out(i)]
        if not self.train or not self.held_out:
            raise InvalidArgumentError(
                f"{folder} holds {len(documents)} documents; must be {HELD_OUT_EVERY} or more, to hold one out"
            )


def _columns(manifest: Manifest, name: str) -> slice:
    columns = manifest.columns([name])
    return slice(columns[0], columns[-1] + 1)


def _with_teacher(shard: Shard, teacher: Teacher) -> Iterator[tuple[CapturedDocument, TeacherRows]]:
    rows, at = teacher.rows(shard), 0
    for document in shard.split():
        end = at + len(document.token_ids)
        yield document, rows.cut(at, end)
        at = end


@dataclass(frozen=True, slots=True)
class Batch:
    """Some documents, padded behind their ends. B documents, T states of the longest, A slots of the longest answer.

    Attributes:
        token_ids: i64[B, T + ahead].
        features: bf16[B, T, W] that the head reads.
        final: bf16[B, T + ahead, H], post-norm.
        teacher: as ``final``.
        slots: i64[B, A], slots that are trained on: those from the last token of the prompt on, or all.
        is_slot: bool[B, A], which of them are no padding.
        ends: i64[B], states of each document that are known.
    """

    token_ids: Tensor
    features: Tensor
    final: Tensor
    teacher: TeacherRows
    slots: Tensor
    is_slot: Tensor
    ends: Tensor

    @classmethod
    def of(cls, documents: Sequence[Document], ahead: int, *, whole_text: bool = False) -> Batch:
        """Pads documents to one length.

        Args:
            documents: at least one.
            ahead: how many tokens behind a slot may be looked at.
            whole_text: take the slots of prompts too.
        """
        counts = [d.length - 1 for d in documents]
        firsts = [0 if whole_text else d.captured.prompt_length - 1 for d in documents]
        width, answers = max(counts), max(count - first for count, first in zip(counts, firsts, strict=True))
        n, deep, hidden = len(documents), width + ahead, documents[0].final.stop - documents[0].final.start
        token_ids = torch.zeros(n, deep, dtype=torch.int64)
        features = torch.zeros(n, width, sum(c.stop - c.start for c in documents[0].columns), dtype=torch.bfloat16)
        final = torch.zeros(n, deep, hidden, dtype=torch.bfloat16)
        teacher = documents[0].teacher.empty(n, deep)
        slots, is_slot = torch.zeros(n, answers, dtype=torch.int64), torch.zeros(n, answers, dtype=torch.bool)
        for i, (document, count, first) in enumerate(zip(documents, counts, firsts, strict=True)):
            states = document.captured.features
            token_ids[i, : count + 1] = document.captured.token_ids[:deep]
            if document.columns:
                features[i, :count] = torch.cat([states[:count, columns] for columns in document.columns], dim=-1)
            final[i, :count] = states[:count, document.final]
            teacher.put(i, document.teacher.cut(0, count))
            slots[i, : count - first] = torch.arange(first, count)
            is_slot[i, : count - first] = True
        return cls(token_ids, features, final, teacher, slots, is_slot, torch.tensor(counts))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__slots__))

    def targets(self, slots: Tensor, is_slot: Tensor, lead: int) -> Tensor:
        """Which slots have a teacher ``lead`` tokens ahead: bool as ``slots``."""
        return is_slot & (slots + lead < self.ends.unsqueeze(-1))


def gather(x: Tensor, slots: Tensor) -> Tensor:
    """``x`` [B, T, ...] at slots i64[B, n]: [B, n, ...]."""
    index = slots.view(*slots.shape, *(1 for _ in x.shape[2:]))
    return x.gather(1, index.expand(*slots.shape, *x.shape[2:]))


def epoch_batches(documents: Sequence[Document], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of documents batch by batch: each document once, those of like length together.

    Args:
        documents: to be visited.
        tokens: of a batch at most, padding included; a longer document is a batch of its own.
        seed: of the order.
        epoch: another one has another order.
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(documents))
    batches: list[list[int]] = []
    for begin in range(0, len(order), _BUCKET):
        bucket = sorted(order[begin : begin + _BUCKET].tolist(), key=lambda i: documents[i].length)
        batches += _fill(bucket, [documents[i].length for i in bucket], tokens)
    return [batches[i] for i in random.permutation(len(batches))]


def _fill(bucket: list[int], lengths: list[int], tokens: int) -> list[list[int]]:
    """Cuts documents of ascending length into batches."""
    batches: list[list[int]] = [[]]
    for index, length in zip(bucket, lengths, strict=True):
        if batches[-1] and length * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
