"""A head's folder and its target's become a drafter in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from draft_svc.drafters.checkpoint import Checkpoint, tensor_files
from draft_svc.drafters.eagle3 import Eagle3Spec
from draft_svc.drafters.head_spec import EMBEDDINGS, HEAD, MASK, OFFSETS
from draft_svc.drafters.heads import FeatureDrafter, Parts
from draft_svc.drafters.kinds import describe, target_folder_of
from draft_svc.drafters.pair_head import PairSpec
from draft_svc.drafters.tree_shapes import Shape, read_shape
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime import layer_shapes
from pilotfish.runtime import weights as runtime
from pilotfish.runtime.allocation import returned_when_freed
from pilotfish.runtime.config import ModelConfig, read_json
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import resolve_device, resolve_dtype
from pilotfish.runtime.models.kernels import choose_kernels
from pilotfish.runtime.models.layers import Kernels
from pilotfish.tokenizer_hash import tokenizer_hash, tokenizer_vocab_size

if TYPE_CHECKING:
    from draft_svc.server import DraftConfig


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_head(config: DraftConfig, folder: Path, kind: str) -> FeatureDrafter:
    """The drafter that ``config`` asks for, with the head of that folder.

    Args:
        config: of the replica.
        folder: of the head.
        kind: mtp, eagle or eagle3.

    Raises:
        NotFoundError: if a file is missing.
        InvalidArgumentError: if the head cannot be run as asked.
    """
    if config.layers is not None:
        raise InvalidArgumentError(f"layers is {config.layers}; a head runs whole, leave it out")
    shape = tree_shape(config)
    checkpoint = Checkpoint.read(folder)
    spec = describe(folder, config.target_model, config.switches(), kind)
    assert spec is not None
    target = target_folder_of(checkpoint, config.target_model)
    tokenizer = folder_with(folder, target, "tokenizer.json")
    device = resolve_device(config.device)
    # Where states of the target are wider than the head's, its first projection reads them one by one.
    kernels = choose_kernels(
        config.kernels,
        spec.config,
        resolve_dtype(config.dtype, device),
        device,
        quantize=config.quantize,
        inputs=[spec.target_hidden],
    )
    vocab_limit = min(spec.config.vocab_size, tokenizer_vocab_size(tokenizer))
    with returned_when_freed():
        head = spec.build(_parts(spec, checkpoint, target, kernels, vocab_limit))
    info = ModelInfo(
        model_id=model_id(config, folder),
        weights_hash=drafter_hash(checkpoint, target, config),
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=spec.config.vocab_size,
        max_len=spec.config.limit_len(config.max_len),
        features=spec.features,
        feature_width=spec.feature_width,
    )
    return FeatureDrafter(
        head,
        tokenizer,
        info,
        spec,
        dtype=kernels.dtype,
        device=device,
        pages=config.page_count,
        page_size=config.page_size,
        tree_width=config.tree_width,
        shape=shape,
        grammar_limits=config.grammar_limits,
    )


def tree_shape(config: DraftConfig) -> Shape | None:
    """The shape of all trees, if one is given; its widths then are those of the trees."""
    if config.tree is None:
        return None
    config.refuse("the file of tree says how wide trees are", "tree_width")
    return read_shape(config.tree)


def model_id(config: DraftConfig, folder: Path) -> str:
    """The drafter's name: as given, else its folder's, and how it is rounded."""
    suffix = "" if config.quantize == "none" else f":{config.quantize}"
    return config.name or folder.resolve().name + suffix


def folder_with(head: Path, target: Path | None, name: str) -> Path:
    """The head's folder if it holds the file, else the target's."""
    if (head / name).is_file():
        return head
    if target is None:
        raise InvalidArgumentError(f"target_model is missing; {head} holds no {name}, so --target-model FOLDER must")
    return target


def _parts(
    spec: PairSpec | Eagle3Spec, checkpoint: Checkpoint, target: Path | None, kernels: Kernels, vocab_limit: int
) -> Parts:
    stored = read_tensors(checkpoint.folder, set(spec.names.values()))
    weights = {name: stored[spec.names[name]] for name in spec.names}
    _add_from_target(weights, spec, checkpoint.folder, target)
    token_ids = None
    if OFFSETS in weights:
        token_ids = _token_ids(weights.pop(OFFSETS), weights.pop(MASK, None), spec.config.vocab_size)
        is_own = spec.has(HEAD)
        kept = token_ids < vocab_limit
        weights[HEAD] = weights[HEAD].index_select(0, kept.nonzero().squeeze(-1) if is_own else token_ids[kept])
        token_ids = token_ids[kept].to(kernels.device)
    else:
        weights[HEAD] = weights[HEAD][:vocab_limit]
    moved = {name: weights.pop(name).to(kernels.device, kernels.dtype) for name in list(weights)}
    return Parts(spec, moved, kernels, token_ids)


def _add_from_target(
    weights: dict[str, Tensor], spec: PairSpec | Eagle3Spec, folder: Path, target: Path | None
) -> None:
    """Embeddings and output layer that the head does not bring."""
    missing = [name for name in (EMBEDDINGS, HEAD) if name not in weights]
    if not missing:
        return
    if target is None:
        raise InvalidArgumentError(
            f"target_model is missing; {folder} holds no {' and no '.join(missing)}, so --target-model FOLDER must"
        )
    weights |= of_target(target, missing, spec.config)


def of_target(target: Path, names: Sequence[str], config: ModelConfig) -> dict[str, Tensor]:
    """The target's embeddings or output layer, by our names, [vocab, hidden] of ``config`` each.

    Raises:
        InvalidArgumentError: if the target has other sizes than the head.
    """
    values = read_json(target, "config.json")
    for key, own in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size)):
        if values.get(key, own) != own:
            raise InvalidArgumentError(
                f"{key} is {own} in the head's config.json and {values[key]} in that of {target}; it was made for "
                "another target"
            )
    is_tied = values.get("tie_word_embeddings") is True
    stored_names = {
        EMBEDDINGS: layer_shapes.EMBEDDINGS,
        HEAD: layer_shapes.EMBEDDINGS if is_tied else layer_shapes.HEAD,
    }
    shape = (config.vocab_size, config.hidden_size)
    stored = runtime.read_tensors(target, {stored_names[name]: shape for name in names})
    return {name: stored[stored_names[name]] for name in names}


def read_tensors(folder: Path, names: set[str]) -> dict[str, Tensor]:
    """The tensors of these names, wherever in the folder's files they lie, and no others.

    Raises:
        InvalidArgumentError: if one is missing, or is a weight or bias that is not stored in floats of 16 bits or more.
    """
    found: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in names.intersection(file.keys())}
        else:
            stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            found |= {name: stored[name] for name in names.intersection(stored.keys())}
    if missing := sorted(names - found.keys()):
        raise InvalidArgumentError(f"{folder} lacks {', '.join(missing)}")
    for name, tensor in found.items():
        if name.endswith((".weight", ".bias")) and tensor.dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"{folder}: {name} is stored as {tensor.dtype}; weights must be floats of 16 bits or more; convert "
                "them first"
            )
    return found


def drafter_hash(checkpoint: Checkpoint, target: Path | None, config: DraftConfig) -> str:
    """SHA-256 in hex over what decides the proposals: both folders, and how the head is run."""
    how = [dict(checkpoint.config), sorted(checkpoint.shapes.items()), config.quantize, astuple(config.switches())]
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
    for path in tensor_files(checkpoint.folder):
        for sample in runtime.file_samples(path):
            digest.update(sample)
    if target is not None:
        digest.update(runtime.weights_hash(target).encode())
    return digest.hexdigest()


def _token_ids(offsets: Tensor, mask: Tensor | None, vocab_size: int) -> Tensor:
    """Target id of every draft id, i64[Vd]: its own plus its offset."""
    if offsets.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(f"{OFFSETS} is stored as {offsets.dtype}; must be integers")
    ids = torch.arange(len(offsets)) + offsets.long()
    require_ids(ids, OFFSETS, vocab_size)
    if mask is not None and not torch.equal(mask.nonzero().squeeze(-1), ids.sort().values):
        raise InvalidArgumentError(f"{MASK} and {OFFSETS} name different tokens")
    return ids


def require_ids(ids: Tensor, name: str, vocab_size: int) -> None:
    """Raises ``InvalidArgumentError`` unless the ids, i64[n], are tokens, each once."""
    if not (ids.min() >= 0 and ids.max() < vocab_size and len(ids.unique()) == len(ids)):
        raise InvalidArgumentError(f"{name} leads to ids outside [0, {vocab_size}) or to one twice")
