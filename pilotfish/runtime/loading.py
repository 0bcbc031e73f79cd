"""A model folder on disk becomes a decoder in memory, with the hashes that name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.allocation import returned_when_freed
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.models.decoder import Decoder
from pilotfish.runtime.models.kernels import choose_kernels
from pilotfish.runtime.progress import Packed, Progress, silent, telling
from pilotfish.runtime.weights import borrow_embeddings, load_weights, weights_hash
from pilotfish.runtime.worker_config import WorkerConfig
from pilotfish.tokenizer_hash import tokenizer_hash, tokenizer_vocab_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what the other side of a stream is told about it; see ``StreamOpened``."""

    model_id: str
    decoder: Decoder
    weights_hash: str
    tokenizer_hash: str
    tokenizer_vocab_size: int
    """Ids that the tokenizer knows; the output layer may have more rows."""
    tokenizer: Path
    """Folder of its tokenizer.json."""

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def info(self, max_len: int | None, features: tuple[str, ...] = (), feature_width: int = 0) -> ModelInfo:
        """What an orchestrator is told; ``max_len`` None is what the model was made for."""
        return ModelInfo(
            model_id=self.model_id,
            weights_hash=self.weights_hash,
            tokenizer_hash=self.tokenizer_hash,
            vocab_size=self.config.vocab_size,
            max_len=self.config.limit_len(max_len),
            features=features,
            feature_width=feature_width,
        )


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    layers: int | None = None,
    quantize: str = "none",
    kernels: str = "auto",
    name: str | None = None,
    embeddings_from: Path | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Loads a Hugging Face model folder.

    Args:
        folder: with config.json, safetensors and tokenizer.json.
        dtype: float32, bfloat16, float16, or auto: float32 on the CPU and bfloat16 elsewhere.
        device: as torch names it, or auto: the first GPU if there is one, else the CPU.
        layers: use only the first so many layers; None for all.
        quantize: none, or int8: another model, nearly the same, half or a quarter of the size.
        kernels: native, torch, or auto: native where that can be.
        name: what to call the model; None for the folder's name.
        embeddings_from: folder of the target, of which a draft model takes embeddings, output layer and tokenizer that
            its own lacks.
        progress: told how far it is.

    Raises:
        NotFoundError: if a file is missing.
        InvalidArgumentError: if the model cannot be run as asked.
    """
    where = resolve_device(device)
    config = ModelConfig.from_folder(folder).with_layers(layers)
    tokenizer = folder
    if embeddings_from is not None and not (folder / "tokenizer.json").is_file():
        tokenizer = embeddings_from
    tokenizer_id = tokenizer_hash(tokenizer)
    borrowed: dict[str, Tensor] = {}
    if embeddings_from is not None:
        config, borrowed = borrow_embeddings(folder, config, embeddings_from)
    hashed = weights_hash(folder, layers, quantize, embeddings_from if borrowed else None)
    with returned_when_freed():
        how = choose_kernels(kernels, config, resolve_dtype(dtype, where), where, quantize=quantize)
        weights = Packed(load_weights(folder, config, how.dtype, where, borrowed, progress), progress)
        borrowed.clear()
        decoder = Decoder(config, weights, how)
    suffix = "" if quantize == "none" else f":{quantize}"
    return LoadedModel(
        model_id=name or folder.resolve().name + suffix,
        decoder=decoder,
        weights_hash=hashed,
        tokenizer_hash=tokenizer_id,
        tokenizer_vocab_size=tokenizer_vocab_size(tokenizer),
        tokenizer=tokenizer,
    )


def load_worker_model(config: WorkerConfig, folder: Path, embeddings_from: Path | None = None) -> LoadedModel:
    """``load_model`` as a worker is configured."""
    return load_model(
        folder,
        dtype=config.dtype,
        device=config.device,
        layers=config.layers,
        quantize=config.quantize,
        kernels=config.kernels,
        name=config.name,
        embeddings_from=embeddings_from,
        progress=telling(config),
    )


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; see ``load_model``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(f"device is {name!r}; must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device is {name!r}; must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type called ``name``; see ``load_model``."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise InvalidArgumentError(f"dtype is {name!r}; must be auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]
