"""A trained head as a folder in the public format of its kind, config.json and model.safetensors in bfloat16."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_svc.drafters.checkpoint import Checkpoint, require_tensors
from draft_svc.drafters.head_loading import read_tensors
from draft_svc.training.heads import DraftModel, Eagle3Head, RecurrentHead
from draft_svc.training.trainee import Trainee
from draft_svc.training.vocabulary import to_mask, to_offsets
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig, RopeConfig

_OF_VOCABULARY = frozenset({"d2t", "t2d", "token_map", "lm_head.weight"})
"""Tensors that say what can be drafted, not how."""


def export(folder: Path, trainee: Trainee, vocabulary: Tensor, target: ModelConfig) -> None:
    """Writes the head.

    Args:
        folder: created if need be; files of an earlier export are replaced.
        trainee: whose head it is.
        vocabulary: i64[Vd], token of every draft id.
        target: sizes of the target.
    """
    head = trainee.head
    tensors, settings = head.export()
    is_reduced = len(vocabulary) < target.vocab_size and not isinstance(head, DraftModel)
    if isinstance(head, RecurrentHead):
        settings |= export_sizes(target, len(head.layers))
    elif is_reduced:
        settings["truncated_vocab_size"] = len(vocabulary)
        tensors["token_map"] = vocabulary
    if isinstance(head, RecurrentHead) and is_reduced:
        settings["draft_vocab_size"] = len(vocabulary)
        tensors["d2t"] = to_offsets(vocabulary)
        if isinstance(head, Eagle3Head):
            tensors["t2d"] = to_mask(vocabulary, target.vocab_size)
    if isinstance(head, Eagle3Head):
        tensors["lm_head.weight"] = trainee.output
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    save_file({name: _stored(tensor) for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def begin_from(folder: Path, trainee: Trainee, vocabulary: Tensor) -> None:
    """Gives the trainee the weights of a head in the format that ``export`` writes.

    The head may draft other tokens. An output layer that is trained begins with its rows where it has them.

    Args:
        folder: of the head.
        trainee: to be trained further.
        vocabulary: i64[Vd], token of every draft id of the trainee.

    Raises:
        InvalidArgumentError: if the head is of another kind or size, naming what differs.
    """
    checkpoint = Checkpoint.read(folder)
    tensors, settings = trainee.head.export()
    for name, wanted in settings.items():
        if (found := checkpoint.config.get(name)) != wanted:
            raise InvalidArgumentError(
                f"{name} is {found!r} in {folder / 'config.json'}; this run begins from {wanted!r}"
            )
    require_tensors(checkpoint, {name: tuple(each.shape) for name, each in tensors.items()}, ignored=_OF_VOCABULARY)
    stored = read_tensors(folder, set(checkpoint.shapes))
    for name, parameter in tensors.items():
        parameter.copy_(stored[name])
    if trainee.output.requires_grad and "lm_head.weight" in stored:
        rows = stored["lm_head.weight"]
        _take_rows(trainee.output, vocabulary, rows, torch.arange(len(rows)) + stored.get("d2t", 0))


def _take_rows(output: Tensor, vocabulary: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Copies those of ``rows``, each of one of ``tokens``, whose token is in the vocabulary."""
    index = {token: i for i, token in enumerate(tokens.tolist())}
    places = torch.tensor([index.get(token, -1) for token in vocabulary.tolist()])
    output[places >= 0] = rows[places[places >= 0]].to(output.dtype)


def _stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()


def export_sizes(target: ModelConfig, layers: int) -> dict[str, Any]:
    """Llama's fields of config.json, those of the target but for the number of layers."""
    return {
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_len,
        "rms_norm_eps": target.rms_eps,
        "rope_parameters": _rope(target.rope),
        "tie_word_embeddings": target.tied_embeddings,
        "torch_dtype": str(torch.bfloat16).removeprefix("torch."),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """As transformers 5 writes it; fields that a kind of stretching does not read are left out."""
    if rope.type == "default":
        return {"rope_type": rope.type, "rope_theta": rope.theta}
    fields = asdict(rope)
    length = {"original_max_position_embeddings": fields.pop("original_max_len")}
    kind = {"rope_type": fields.pop("type"), "rope_theta": fields.pop("theta")}
    return kind | length | {name: value for name, value in fields.items() if value is not None}
