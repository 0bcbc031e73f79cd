"""What the target thinks comes next, kept as the likeliest few of the draft vocabulary at every token.

The states say it all, but a logit costs a pass over a row of lm_head, and a head is trained on the same text many
times. So the logits of the likeliest 64 are computed once per shard and kept beside it: 256 bytes a token.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_svc.training.shards import Manifest, Shard

_KEPT = 64
_CHUNK = 512  # states whose logits exist at once


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Likeliest tokens, ``K`` at each place.

    Attributes:
        ids: i32[..., K], draft ids, likeliest first.
        logits: bf16[..., K].
    """

    ids: Tensor
    logits: Tensor

    def cut(self, begin: int, end: int) -> TeacherRows:
        return TeacherRows(self.ids[begin:end], self.logits[begin:end])

    def empty(self, batch: int, length: int) -> TeacherRows:
        """Room for ``batch`` documents."""
        shape = (batch, length, self.ids.shape[-1])
        return TeacherRows(self.ids.new_zeros(shape), self.logits.new_zeros(shape))

    def put(self, row: int, rows: TeacherRows) -> None:
        """Copies a document's to the beginning of a row."""
        self.ids[row, : len(rows.ids)] = rows.ids
        self.logits[row, : len(rows.ids)] = rows.logits

    def to(self, device: torch.device) -> TeacherRows:
        return TeacherRows(self.ids.to(device), self.logits.to(device))


class Teacher:
    """Computes rows, or finds those computed before.

    Args:
        head: rows of the target's lm_head for the draft vocabulary, bf16[Vd, H].
        manifest: of the shards.
        cache: folder to keep them in.
    """

    def __init__(self, head: Tensor, manifest: Manifest, cache: Path) -> None:
        self._head = head
        self._manifest = manifest
        # Another vocabulary, or other weights, are another teacher.
        self._folder = cache / f"teacher-{_digest(head.view(torch.int16))}"

    def rows(self, shard: Shard) -> TeacherRows:
        """Of every token of a shard, in its order."""
        # Not by the shard's name: a capture that goes on writes its last shards anew under the same names.
        kept = self._folder / f"{_digest(shard.token_ids)}.safetensors"
        if not kept.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
            rows = self._compute(shard)
            save_file({"ids": rows.ids, "logits": rows.logits}, part)
            os.replace(part, kept)
        tensors = load_file(kept)
        return TeacherRows(tensors["ids"], tensors["logits"])

    @torch.inference_mode()
    def _compute(self, shard: Shard) -> TeacherRows:
        columns = self._manifest.columns(["final"])
        ids, logits = [], []
        for states in shard.features[:, columns[0] : columns[-1] + 1].split(_CHUNK):
            top = torch.topk(states @ self._head.T, min(_KEPT, len(self._head)), dim=-1)
            logits.append(top.values)
            ids.append(top.indices.to(torch.int32))
        return TeacherRows(torch.cat(ids), torch.cat(logits))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
