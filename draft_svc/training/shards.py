"""Captured text on disk: a folder of safetensors shards, and a manifest that says whose states they hold.

A shard holds whole documents, concatenated. Feature i of a document is the target's state AT token i, so that the pair
of a head's slot i is (feature i, token i + 1); see HEADS.md, section 1.1.

==================  ===============  ====================================================================
``token_ids``       i32[tokens]      prompt and answer, chat template and end token included
``lengths``         i32[documents]   tokens of each
``prompt_lengths``  i32[documents]   tokens before the answer; those from there on are trained and judged on
``temperatures``    f32[documents]   that the answer was drawn at; 0 is greedy
``features``        bf16[tokens, W]  the states that the manifest names, side by side
==================  ===============  ====================================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotfish.errors import InvalidArgumentError, NotFoundError

MANIFEST = "manifest.json"
FORMAT = 1  # raised when a tensor changes its name or meaning

HELD_OUT_EVERY = 20  # 5 % of the documents

_DTYPES = {
    "token_ids": torch.int32,
    "lengths": torch.int32,
    "prompt_lengths": torch.int32,
    "temperatures": torch.float32,
    "features": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of shards is of."""

    model_id: str
    weights_hash: str
    """Of the target, as it tells an orchestrator; a head fits this target alone."""
    tokenizer_hash: str
    features: tuple[str, ...]
    """Names as in types.proto, in the order of the columns."""
    hidden_size: int
    """Columns of each feature."""
    dtype: str
    """That the target computed in; features are stored in bfloat16 whatever it was."""
    recipe: Mapping[str, Any]
    """Everything that decides what the documents are; a capture goes on only with the same."""
    shards: int = 0
    whole_shards: int = 0
    """The first so many hold all documents of their numbers; a capture goes on after them. What follows is what was
    at hand when there was enough."""
    documents: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    format: int = FORMAT

    @property
    def feature_width(self) -> int:
        return self.hidden_size * len(self.features)

    def counting(self, shard: Shard, *, is_whole: bool) -> Manifest:
        """The manifest with one more shard."""
        return replace(
            self,
            shards=self.shards + 1,
            whole_shards=self.whole_shards + is_whole,
            documents=self.documents + len(shard.lengths),
            tokens=self.tokens + len(shard.token_ids),
            answer_tokens=self.answer_tokens + shard.answer_tokens,
        )

    def columns(self, names: Sequence[str]) -> list[int]:
        """Column indices of the named features side by side, in the order asked for.

        Raises:
            InvalidArgumentError: naming the first feature that was not captured.
        """
        for name in names:
            if name not in self.features:
                raise InvalidArgumentError(
                    f"feature {name!r} was not captured; there are {', '.join(self.features)}: "
                    f"capture again with --features"
                )
        starts = [self.features.index(name) * self.hidden_size for name in names]
        return [column for start in starts for column in range(start, start + self.hidden_size)]

    def write(self, folder: Path) -> None:
        """Replaces the folder's manifest at once."""
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder of captured text.

        Raises:
            NotFoundError: if there is none.
            InvalidArgumentError: if it is none of ours.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise NotFoundError(f"{path} does not exist; `pilotfish train capture --out {folder}` writes one")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgumentError(f"{path} is not JSON ({error}); capture again") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise InvalidArgumentError(f"{path} must be an object of {', '.join(sorted(names))}; capture again")
        if values["format"] != FORMAT:
            raise InvalidArgumentError(f"format is {values['format']} in {path}; this version reads {FORMAT}")
        return cls(**(values | {"features": tuple(values["features"])}))


@dataclass(frozen=True, slots=True)
class Shard:
    """Some documents; tensors as in the module's table."""

    token_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    temperatures: Tensor
    features: Tensor

    @classmethod
    def of(cls, documents: Sequence[CapturedDocument]) -> Shard:
        """Joins documents in the order given."""
        return cls(
            token_ids=torch.cat([document.token_ids for document in documents]),
            lengths=torch.tensor([len(document.token_ids) for document in documents], dtype=torch.int32),
            prompt_lengths=torch.tensor([document.prompt_length for document in documents], dtype=torch.int32),
            temperatures=torch.tensor([document.temperature for document in documents], dtype=torch.float32),
            features=torch.cat([document.features for document in documents]),
        )

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def split(self) -> list[CapturedDocument]:
        """The documents, as views."""
        ends = [0, *self.lengths.cumsum(0).tolist()]
        prompts = self.prompt_lengths.tolist()
        return [
            CapturedDocument(
                token_ids=self.token_ids[begin:end],
                prompt_length=prompts[i],
                temperature=float(self.temperatures[i]),
                features=self.features[begin:end],
            )
            for i, (begin, end) in enumerate(pairwise(ends))
        ]

    def write(self, path: Path) -> None:
        """Writes the file at once, so that a shard is there whole or not at all."""
        part = path.with_name(f"{path.name}.part")
        save_file({name: getattr(self, name).contiguous() for name in _DTYPES}, part)
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path, feature_width: int) -> Shard:
        """Reads and checks one file.

        Args:
            path: of the shard.
            feature_width: as the manifest says.

        Raises:
            InvalidArgumentError: if the file is damaged, naming it and what is wrong.
        """
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"{path} cannot be read ({error}); delete it and capture again") from error
        if tensors.keys() != _DTYPES.keys():
            raise InvalidArgumentError(f"{path} holds {sorted(tensors)}; must be {sorted(_DTYPES)}")
        for name, dtype in _DTYPES.items():
            if tensors[name].dtype != dtype:
                raise InvalidArgumentError(f"{name} is {tensors[name].dtype} in {path}; must be {dtype}")
        shard = cls(**tensors)
        count, total = len(shard.lengths), int(shard.lengths.sum())
        shapes = {
            "token_ids": (total,),
            "features": (total, feature_width),
            "prompt_lengths": (count,),
            "temperatures": (count,),
        }
        for name, shape in shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise InvalidArgumentError(f"{name} has shape {tuple(tensors[name].shape)} in {path}; must be {shape}")
        if count and not bool(((shard.prompt_lengths > 0) & (shard.prompt_lengths < shard.lengths)).all()):
            raise InvalidArgumentError(f"prompt_lengths in {path} must be within their documents")
        return shard


@dataclass(frozen=True, slots=True)
class CapturedDocument:
    """One document: a prompt, its answer, and a state at every token."""

    token_ids: Tensor  # i32[n]
    prompt_length: int
    temperature: float
    features: Tensor  # bf16[n, W]

    @property
    def answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The folder's shards in order.

    Raises:
        NotFoundError: if there are none.
    """
    paths = sorted(folder.glob("shard-*.safetensors"))
    if not paths:
        raise NotFoundError(f"{folder} holds no shard-*.safetensors; `pilotfish train capture` writes them")
    return paths


def is_held_out(index: int) -> bool:
    """Whether a document is judged on and never trained on; ``index`` counts those of two answer tokens and more."""
    return index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
