"""What a target takes of its device's memory, known before it is loaded. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_budget import Need, model_need
from pilotfish.simulate.pages import simulated_need

if TYPE_CHECKING:
    from target_svc.server import TargetConfig


def need_of(config: TargetConfig, device: str) -> Need:
    """Of a target with these settings, on cpu or cuda.

    Raises:
        NotFoundError: if its folder lacks config.json.
        InvalidArgumentError: if the model cannot be run as asked.
    """
    if config.simulate is not None:
        return simulated_need(config.model, config.max_len, config.page_size)
    model = ModelConfig.from_folder(config.model)
    return model_need(
        model.with_layers(config.layers),
        device=device,
        dtype=config.dtype,
        quantize=config.quantize,
        page_size=config.page_size,
        max_len=config.max_len,
        feature_width=model.hidden_size * len(config.feature_names),
    )
