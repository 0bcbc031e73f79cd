"""The folder that pulled models live in, and how one gets there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_ORIGIN = "pilotfish-origin.txt"


def home() -> Path:
    """``$PILOTFISH_HOME``, by default ``~/.cache/pilotfish``."""
    return Path(os.environ.get("PILOTFISH_HOME") or Path.home() / ".cache" / "pilotfish").expanduser()


def build_once(name: str, origin: str, build: Callable[[Path], None]) -> Path:
    """The folder ``models/NAME``, built if it is not there.

    It is built beside its place and renamed, so a folder that is there is complete, whatever was
    interrupted and however many processes build at once.

    Args:
        name: of the folder.
        origin: what it is made from and by which version of what; a folder of another origin is replaced.
        build: fills the empty folder it is given.

    Raises:
        Whatever ``build`` raises; nothing is left behind then.
    """
    place = home() / "models" / name
    if _origin(place) == origin:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place.parent) as beside:
        fresh = Path(beside) / "new"
        fresh.mkdir()
        build(fresh)
        (fresh / _ORIGIN).write_text(origin + "\n", encoding="utf-8")
        _replace(fresh, place, Path(beside) / "old")
    return place


def _origin(place: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (place / _ORIGIN).read_text(encoding="utf-8").strip()
    return None


def _replace(fresh: Path, place: Path, old: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        place.rename(old)
    try:
        fresh.rename(place)
    except OSError:
        # Another process put the same model there in this moment; a rename never overwrites a full folder.
        if _origin(place) != (fresh / _ORIGIN).read_text(encoding="utf-8").strip():
            raise
        shutil.rmtree(fresh)
