"""The optional parts of Pilotfish, ``pip install 'pilotfish[NAME]'``: what they bring, and what to do without one.

``pip install pilotfish`` is the SDK and the command line; what runs models is the extra ``serve``. Which packages an
extra brings is read from the installed metadata, so that this never tells otherwise than pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from pilotfish.errors import FailedPreconditionError

_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")


def require(extra: str, what: str) -> None:
    """Returns if everything that the extra brings is installed.

    Args:
        extra: such as ``serve``.
        what: needs it; the subject of the message.

    Raises:
        FailedPreconditionError: with the command that installs it.
    """
    missing = next((package for package in _packages(extra) if not _is_installed(package)), None)
    if missing is not None:
        raise _missing(extra, what, missing)


def require_or_exit(extra: str, what: str) -> None:
    """``require`` of a program that has no command line of ours around it: exits with status 2 and the message."""
    try:
        require(extra, what)
    except FailedPreconditionError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def explain(error: ModuleNotFoundError, what: str) -> FailedPreconditionError | None:
    """What to tell of a module that is not there: which extra has it; None if none of ours does."""
    module = _canonical((error.name or "").partition(".")[0])
    for extra in metadata.metadata("pilotfish").get_all("Provides-Extra") or []:
        if extra != "dev" and module in map(_canonical, _packages(extra)):
            return _missing(extra, what, module)
    return None


def _missing(extra: str, what: str, package: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{what} needs {package}, which is not installed; install it with: pip install 'pilotfish[{extra}]'"
    )


def _packages(extra: str) -> list[str]:
    """Those that the extra brings everywhere, as pyproject.toml spells them."""
    found = map(_REQUIREMENT.match, metadata.requires("pilotfish") or [])
    return [match[1] for match in found if match and match[2] == extra and "sys_platform" not in match[0]]


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
