"""The frozen parts of the target that training needs: embeddings, lm_head, sizes, and layers to begin from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_svc.training.shards import Manifest
from pilotfish.errors import FailedPreconditionError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.weights import load_weights, weights_hash


@dataclass(frozen=True, slots=True)
class Target:
    """Weights of the target, in bfloat16 or float32 on the CPU.

    Attributes:
        config: sizes.
        weights: all of them, by Hugging Face name.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, dtype: torch.dtype) -> Target:
        """Reads the model whose text was captured.

        Raises:
            FailedPreconditionError: if the text is of another model.
        """
        if manifest.weights_hash != weights_hash(folder):
            raise FailedPreconditionError(
                f"the captured text is of {manifest.model_id}, whose weights are not those of {folder}; capture again"
            )
        config = ModelConfig.from_folder(folder)
        return cls(config, load_weights(folder, config, dtype, torch.device("cpu")))

    @property
    def embeddings(self) -> Tensor:
        return self.weights["model.embed_tokens.weight"]

    def output(self, vocabulary: Tensor) -> Tensor:
        """Rows of lm_head for ascending token ids, [Vd, H]."""
        head = self.embeddings if self.config.tied_embeddings else self.weights["lm_head.weight"]
        return head[vocabulary].contiguous()
