"""Strict loading of safetensors checkpoints: one file or several, nothing missing, nothing unknown.

A decoder states which tensors it needs and in which shapes; the checkpoint must hold exactly those.
Three exceptions, all written by real tools: tensors of layers beyond the first N when only N are
loaded, those of a multi-token prediction head that config.json counts, which a drafter reads, and
``rotary_emb.inv_freq``, which old Llama files carry and which the configuration gives.
A stored lm_head of a tied model is accepted if it equals the embeddings; if not, the flag and the
file contradict each other and the user must say which is right. A draft model may lack embeddings and
lm_head, and borrow them from its target.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.config import ModelConfig, read_json
from pilotfish.runtime.layer_shapes import EMBEDDINGS, HEAD, expected_shapes
from pilotfish.runtime.progress import Progress, silent

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_UNUSED = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")
_PREDICTION = ("mtp.", "model.mtp_layers.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    borrowed: Mapping[str, Tensor] | None = None,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    """Reads the tensors of ``expected_shapes``, converted to ``dtype`` on ``device``.

    Args:
        folder: a Hugging Face model folder.
        config: of the model.
        dtype: of the result.
        device: of the result.
        borrowed: tensors that the folder lacks; see ``borrow_embeddings``.
        progress: told after every tensor.

    Raises:
        NotFoundError: if the folder has no safetensors files.
        InvalidArgumentError: on a corrupt file, or a missing, unknown or wrongly shaped tensor.
    """
    expected = expected_shapes(config)
    weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in (borrowed or {}).items()}
    read, total = 0, dtype.itemsize * sum(math.prod(expected[name]) for name in expected.keys() - weights.keys())
    tied_head: Tensor | None = None
    for path, names in checkpoint_files(folder).items():
        for name, tensor in _read(path, names, expected, config):
            if name in expected:
                weights[name] = tensor.to(device=device, dtype=dtype)
                read += weights[name].nbytes
                progress("reading", read, total)
            else:
                tied_head = tensor
    missing = sorted(expected.keys() - weights.keys())
    if missing and {EMBEDDINGS, HEAD}.issuperset(missing):
        raise InvalidArgumentError(
            f"{folder} lacks {_list(missing)}; a draft model may have its target's, once that is named"
        )
    if missing:
        raise InvalidArgumentError(
            f"{folder} lacks {_list(missing)}; the checkpoint does not fit its config.json, fetch the model again"
        )
    embeddings = weights[EMBEDDINGS]
    if tied_head is not None and not torch.equal(tied_head.to(device=device, dtype=dtype), embeddings):
        raise InvalidArgumentError(
            f"{folder} ties the embeddings, yet stores an lm_head.weight that differs from them; "
            "set tie_word_embeddings to false in config.json, or remove lm_head.weight"
        )
    return weights


def borrow_embeddings(folder: Path, config: ModelConfig, target: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """What a draft model's folder lacks of embeddings and lm_head, from its target.

    Returns:
        ``config``, tied if embeddings and lm_head are the target's and are one there; and the borrowed tensors by name,
        none if the folder lacks none.

    Raises:
        NotFoundError: if one of the folders has no safetensors files.
        InvalidArgumentError: if the target's vocabulary or hidden size is another.
    """
    stored = {name for path in checkpoint_files(folder) for name in _names(path)}
    lacks_embeddings = EMBEDDINGS not in stored
    lacks_head = HEAD not in stored and (lacks_embeddings or not config.tied_embeddings)
    if not (lacks_embeddings or lacks_head):
        return config, {}
    is_tied = ModelConfig.from_folder(target).tied_embeddings
    head = EMBEDDINGS if is_tied else HEAD
    shape = (config.vocab_size, config.hidden_size)
    sources = {EMBEDDINGS: EMBEDDINGS} if lacks_embeddings else {}
    if lacks_head and not (is_tied and lacks_embeddings):
        sources[HEAD] = head
    found = read_tensors(target, dict.fromkeys(sources.values(), shape))
    if lacks_head:
        config = replace(config, tied_embeddings=HEAD not in sources)
    return config, {name: found[source] for name, source in sources.items()}


def read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Only these tensors of a model folder, as they are stored.

    Raises:
        NotFoundError: if the folder has no safetensors files.
        InvalidArgumentError: on a corrupt file, or a missing or wrongly shaped tensor.
    """
    found: dict[str, Tensor] = {}
    for path in checkpoint_files(folder):
        with _open(path) as file:
            for name in sorted(shapes.keys() & file.keys()):
                found[name] = _tensor(path, file, name, shapes[name])
    if missing := sorted(shapes.keys() - found.keys()):
        raise InvalidArgumentError(f"{folder} lacks {_list(missing)}")
    return found


def checkpoint_files(folder: Path) -> dict[Path, set[str] | None]:
    """Files of the checkpoint with the tensors that the index says they hold (None: no index)."""
    if not folder.is_dir():
        raise NotFoundError(f"model folder {folder} does not exist; fetch one with `pilotfish pull`, which prints it")
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if not (folder / INDEX_FILE).is_file():
        raise NotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InvalidArgumentError(f"{folder / INDEX_FILE} has no weight_map of names to files; fetch the model again")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise InvalidArgumentError(f"{folder / INDEX_FILE} names the file {file!r}; must lie in the same folder")
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    return dict(sorted(files.items()))


def weights_hash(
    folder: Path, layers: int | None = None, quantize: str = "none", borrowed_from: Path | None = None
) -> str:
    """SHA-256 in hex over the configuration, all tensor headers and a sample of every file's bytes.

    Args:
        folder: a Hugging Face model folder.
        layers: how many of the first layers are used; None for all. Another number is another model.
        quantize: how the weights are rounded once read. Another way is another model.
        borrowed_from: the folder that the embeddings are from, if it is another.
    """
    how = [read_json(folder, "config.json"), layers, quantize]
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode())
    for path in checkpoint_files(folder):
        with _open(path) as file:
            header = [(n, (t := file.get_slice(n)).get_dtype(), t.get_shape()) for n in sorted(file.keys())]
        digest.update(json.dumps([path.name, header]).encode())
        for sample in file_samples(path):
            digest.update(sample)
    if borrowed_from is not None:
        digest.update(weights_hash(borrowed_from).encode())
    return digest.hexdigest()


def file_samples(path: Path) -> Iterator[bytes]:
    """Blocks spread evenly from the first to the last byte of a file; the whole of it if it is short."""
    size = path.stat().st_size
    last = max(size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist, though {INDEX_FILE} names it; fetch the model again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidArgumentError(f"{path} is corrupt or cut short ({error}); fetch the model again") from error


def _read(
    path: Path, indexed: set[str] | None, expected: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file that matter: those expected, and a stored head of a tied model."""
    with _open(path) as file:
        names = set(file.keys())
        if indexed is not None and names != indexed:
            raise InvalidArgumentError(f"{path} and {INDEX_FILE} disagree about {_list(sorted(names ^ indexed))}")
        tied_head = {"lm_head.weight"} if config.tied_embeddings else set()
        unknown = sorted(n for n in names if n not in expected and n not in tied_head and not _is_unused(n, config))
        if unknown:
            raise InvalidArgumentError(f"{path} holds {_list(unknown)}, unknown to {config.architecture}")
        for name in sorted(names & (expected.keys() | tied_head)):
            wanted = expected.get(name, (config.vocab_size, config.hidden_size))
            yield name, _tensor(path, file, name, wanted)


def _tensor(path: Path, file: Any, name: str, wanted: tuple[int, ...]) -> Tensor:
    """A tensor of that name, checked."""
    part = file.get_slice(name)
    shape, stored = tuple(part.get_shape()), part.get_dtype()
    if shape != wanted:
        raise InvalidArgumentError(f"{path}: {name} has shape {shape}; config.json asks for {wanted}")
    if stored not in _FLOATS:
        raise InvalidArgumentError(f"{path}: {name} is stored as {stored}; known are {sorted(_FLOATS)}")
    tensor: Tensor = file.get_tensor(name)
    return tensor


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _is_unused(name: str, config: ModelConfig) -> bool:
    if _UNUSED.search(name):
        return True
    if config.prediction_layers and name.startswith(_PREDICTION):
        return True
    layer, stored = _LAYER.match(name), config.checkpoint_layers + config.prediction_layers
    return layer is not None and config.layers <= int(layer[1]) < stored


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
