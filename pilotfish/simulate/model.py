"""What a simulated model takes from a model folder: the tokenizer, the vocabulary, the longest row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.grants import ModelInfo
from pilotfish.tokenizer_hash import tokenizer_hash, tokenizer_vocab_size


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model that is all name."""

    info: ModelInfo
    token_limit: int
    """Ids that the tokenizer knows; the model writes no others."""


def read_model(folder: Path, name: str, max_len: int | None) -> SimulatedModel:
    """Reads config.json and tokenizer.json.

    Raises:
        NotFoundError: if one is missing.
        InvalidArgumentError: if one is broken, or the model was not made for rows of ``max_len`` tokens.
    """
    config = ModelConfig.from_folder(folder)
    info = ModelInfo(
        model_id=name,
        weights_hash=hashlib.sha256(b"simulated").hexdigest(),
        tokenizer_hash=tokenizer_hash(folder),
        vocab_size=config.vocab_size,
        max_len=config.limit_len(max_len),
    )
    return SimulatedModel(info, token_limit=min(config.vocab_size, tokenizer_vocab_size(folder)))
