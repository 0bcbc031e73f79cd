"""A folder of Medusa heads and its target's become a drafter in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draft_svc.drafters import medusa
from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_loading import (
    drafter_hash,
    folder_with,
    model_id,
    of_target,
    read_tensors,
    require_ids,
    tree_shape,
)
from draft_svc.drafters.head_spec import HEAD
from draft_svc.drafters.kinds import sizes_of, target_folder_of
from draft_svc.drafters.medusa import TOKEN_MAP, MedusaSpec
from draft_svc.drafters.medusa_drafter import MedusaDrafter, MedusaHeads
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.allocation import returned_when_freed
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import resolve_device, resolve_dtype
from pilotfish.runtime.models.kernels import choose_kernels
from pilotfish.runtime.models.layers import Kernels, OutputHead, Projection
from pilotfish.tokenizer_hash import tokenizer_hash, tokenizer_vocab_size

if TYPE_CHECKING:
    from draft_svc.server import DraftConfig


def load_medusa(config: DraftConfig, folder: Path) -> MedusaDrafter:
    """The drafter that ``config`` asks for, with the heads of that folder.

    Raises:
        NotFoundError: if a file is missing.
        InvalidArgumentError: if the heads cannot be run as asked.
    """
    if config.layers is not None:
        raise InvalidArgumentError(f"layers is {config.layers}; a head runs whole, leave it out")
    config.switches().refuse("Medusa", "h_source", "feedback", "aux_layers")
    shape = tree_shape(config)
    checkpoint = Checkpoint.read(folder)
    target = target_folder_of(checkpoint, config.target_model)
    if target is None:
        raise InvalidArgumentError("target_model is missing; Medusa heads need their target's, --target-model FOLDER")
    sizes = sizes_of(target)
    spec = medusa.read(checkpoint, sizes)
    tokenizer = folder_with(folder, target, "tokenizer.json")
    device = resolve_device(config.device)
    kernels = choose_kernels(
        config.kernels, sizes, resolve_dtype(config.dtype, device), device, quantize=config.quantize
    )
    with returned_when_freed():
        heads = _Loading(spec, checkpoint, target, kernels, tokenizer_vocab_size(tokenizer)).heads()
    info = ModelInfo(
        model_id=model_id(config, folder),
        weights_hash=drafter_hash(checkpoint, target, config),
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=sizes.vocab_size,
        max_len=sizes.limit_len(config.max_len),
        features=medusa.FEATURES,
        feature_width=sizes.hidden_size,
    )
    return MedusaDrafter(
        heads,
        tokenizer,
        info,
        dtype=kernels.activations,
        device=device,
        pages=config.page_count,
        page_size=config.page_size,
        tree_width=config.tree_width,
        shape=shape,
        grammar_limits=config.grammar_limits,
    )


class _Loading:
    """Tensors on their way into heads; each leaves once it has become part of one.

    Args:
        spec: what the checkpoint holds.
        checkpoint: the same.
        target: folder whose output layer heads without one use.
        kernels: make the parts.
        vocab_limit: tokens from here on are never proposed; they only pad the output layer.
    """

    def __init__(
        self, spec: MedusaSpec, checkpoint: Checkpoint, target: Path, kernels: Kernels, vocab_limit: int
    ) -> None:
        self._spec, self._kernels = spec, kernels
        stored = read_tensors(checkpoint.folder, set(spec.names.values()))
        self._weights = {name: stored[at] for name, at in spec.names.items()}
        if not spec.has_own_layers and HEAD not in self._weights:
            self._weights |= of_target(target, [HEAD], spec.config)
        ids = torch.arange(spec.config.vocab_size)
        self._is_reduced = TOKEN_MAP in self._weights
        if self._is_reduced:
            ids = self._weights.pop(TOKEN_MAP).long()
            require_ids(ids, TOKEN_MAP, spec.config.vocab_size)
        self._map_length = len(ids)
        self._kept = ids < vocab_limit
        self._ids = ids[self._kept]

    def heads(self) -> MedusaHeads:
        spec = self._spec
        blocks = [[self._block(f"{j}.{layer}") for layer in range(spec.blocks)] for j in range(spec.heads)]
        if spec.has_own_layers:
            outputs = [self._output(f"{j}.lm_head.weight") for j in range(spec.heads)]
        else:
            outputs = [self._output(HEAD)] * spec.heads
        return MedusaHeads(blocks, outputs, self._ids.to(self._kernels.device) if self._is_reduced else None)

    def _block(self, name: str) -> Projection:
        bias = self._weights.pop(f"{name}.bias", None)
        weight = self._moved(self._weights.pop(f"{name}.weight"))
        return self._kernels.projection(weight, None if bias is None else self._moved(bias))

    def _output(self, name: str) -> OutputHead:
        matrix = self._weights.pop(name)
        # With a reduced vocabulary its rows may be stored, or those of all tokens.
        matrix = matrix[self._kept] if len(matrix) == self._map_length else matrix[self._ids]
        return self._kernels.output_heads(self._moved(matrix), [None], 0.0)[0]

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._kernels.device, self._kernels.dtype)
