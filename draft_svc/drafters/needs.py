"""What a draft takes of its device's memory, known before it is loaded. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draft_svc.drafters import medusa, method_of, simulated_model_folder
from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_spec import EMBEDDINGS, HEAD, HeadSpec
from draft_svc.drafters.kinds import READERS, describe, sizes_of, target_folder_of
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_budget import Need, element_bytes, model_need, page_bytes, weights_bytes
from pilotfish.simulate.pages import simulated_need

if TYPE_CHECKING:
    from draft_svc.server import DraftConfig


def need_of(config: DraftConfig, device: str) -> Need:
    """Of a draft with these settings, on cpu or cuda.

    Raises:
        NotFoundError: if a folder lacks a file.
        InvalidArgumentError: if the drafter cannot be run as asked.
    """
    if config.simulate is not None:
        return simulated_need(simulated_model_folder(config), config.max_len, config.page_size)
    kind, folder = method_of(config)
    if kind in READERS:
        spec = describe(folder, config.target_model, config.switches(), kind)
        assert spec is not None
        return _head_need(config, spec, device)
    if kind == "medusa":
        return _medusa_need(config, folder, device)
    return model_need(
        ModelConfig.from_folder(folder).with_layers(config.layers),
        device=device,
        dtype=config.dtype,
        quantize=config.quantize,
        page_size=config.page_size,
        max_len=config.max_len,
    )


def _head_need(config: DraftConfig, spec: HeadSpec, device: str) -> Need:
    sizes, modules, element = spec.config, spec.modules, element_bytes(config.dtype, device)
    shapes = dict(spec.shapes)
    for name in (EMBEDDINGS, HEAD):  # the target's, where it does not bring its own
        shapes.setdefault(name, (sizes.vocab_size, sizes.hidden_size))
    kept_for_next = sizes.hidden_size * element * config.page_size  # by all modules but the last
    return Need(
        weights_bytes=weights_bytes(shapes, device=device, dtype=config.dtype, quantize=config.quantize),
        page_bytes=modules * page_bytes(sizes, config.page_size, element) + (modules - 1) * kept_for_next,
        max_len=sizes.limit_len(config.max_len),
        page_size=config.page_size,
    )


def _medusa_need(config: DraftConfig, folder: Path, device: str) -> Need:
    checkpoint = Checkpoint.read(folder)
    target = target_folder_of(checkpoint, config.target_model)
    if target is None:
        raise InvalidArgumentError("target_model is missing; Medusa heads need their target's, --target-model FOLDER")
    sizes = sizes_of(target)
    shapes = dict(medusa.read(checkpoint, sizes).shapes)
    shapes.setdefault(HEAD, (sizes.vocab_size, sizes.hidden_size))
    return Need(
        weights_bytes=weights_bytes(shapes, device=device, dtype=config.dtype, quantize=config.quantize),
        page_bytes=config.page_size * 4,  # token ids alone
        max_len=sizes.limit_len(config.max_len),
        page_size=config.page_size,
    )
