"""What a drafter's folder holds: its config.json, and names and shapes of its tensors. Imports no torch.

Heads are published as safetensors or as files of ``torch.save``. Of the latter only the pickled outline
is read here, by a reader that knows what a tensor looks like and calls nothing that the file names.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.config import read_json

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_SUFFIXES = (".safetensors", ".bin", ".pt")  # the first that any file has is the format of the folder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One folder.

    Attributes:
        folder: where it lies.
        config: its config.json.
        shapes: of all its tensors, by stored name.
    """

    folder: Path
    config: Mapping[str, Any]
    shapes: Shapes

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Reads configuration and outlines, no weights.

        Raises:
            NotFoundError: if the folder, config.json or every file of tensors is missing.
            InvalidArgumentError: if one of them cannot be read.
        """
        config = read_json(folder, "config.json")
        shapes: dict[str, Shape] = {}
        for path in tensor_files(folder):
            for name, shape in _outline(path):
                if name in shapes:
                    raise InvalidArgumentError(f"{folder} holds {name} twice; remove the file that does not belong")
                shapes[name] = shape
        return cls(folder, config, shapes)


def tensor_files(folder: Path) -> list[Path]:
    """Files of tensors in the folder, all of one format: safetensors where there are any, else .bin, else .pt.

    Raises:
        NotFoundError: if there are none.
    """
    for suffix in _SUFFIXES:
        if found := sorted(path for path in folder.iterdir() if path.suffix == suffix):
            return found
    raise NotFoundError(f"{folder} holds no tensors: no file ends in {', '.join(_SUFFIXES)}")


def _outline(path: Path) -> Iterator[tuple[str, Shape]]:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy") as file:
                yield from ((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"{path} cannot be read ({error}); fetch it again") from error
        return
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(pickled) as file:
                tensors = _Outliner(file).load()
    except Exception as error:  # a damaged pickle fails in any way it likes
        raise InvalidArgumentError(f"{path} is no file of torch.save ({error}); fetch it again") from error
    if not isinstance(tensors, dict):
        raise InvalidArgumentError(f"{path} holds a {type(tensors).__name__}; must be tensors by name")
    yield from ((str(name), shape) for name, shape in tensors.items() if isinstance(shape, tuple))


class _Outliner(pickle.Unpickler):
    """Builds shapes where the file would have tensors built."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if name.startswith("_rebuild_tensor"):
            return lambda storage, offset, size, *rest: tuple(size)
        if name.startswith("_rebuild_parameter"):
            return lambda shape, *rest: shape
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return lambda *arguments: None

    def persistent_load(self, pid: Any) -> None:
        """Storages are left where they are."""


def require_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], *, ignored: frozenset[str] = frozenset()
) -> None:
    """Raises ``InvalidArgumentError`` naming tensors that are missing, unknown or of another shape.

    Args:
        checkpoint: whose tensors.
        expected: stored name and shape of every tensor that is used.
        ignored: stored names that may be there and are not used.
    """
    folder, shapes = checkpoint.folder, checkpoint.shapes
    if missing := sorted(expected.keys() - shapes.keys()):
        raise InvalidArgumentError(f"{folder} lacks {_list(missing)}")
    if unknown := sorted(shapes.keys() - expected.keys() - ignored):
        raise InvalidArgumentError(f"{folder} holds {_list(unknown)}, which this kind of head does not have")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise InvalidArgumentError(f"{folder}: {name} has shape {shapes[name]}; must be {shape}")


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
