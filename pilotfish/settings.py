"""How every service reads its settings: flags, then environment, then a file, checked in one place.

A service declares one frozen subclass of ``Settings`` with a docstring under each field, and calls
``load``. Flags are in kebab case (``--max-rows``), environment variables upper case with the
service's prefix, the file is TOML and named by ``--config FILE``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from pilotfish.errors import PilotfishError

SettingsType = TypeVar("SettingsType", bound="Settings")

USAGE_ERROR = 2


class Settings(BaseSettings):
    """Base of every service's settings."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_enforce_required=False,
    )

    log_level: str = "info"
    """debug, info, warning or error."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(kind: type[SettingsType], argv: Sequence[str], program: str) -> SettingsType:
    """Settings from ``argv``, the environment and the file that ``--config`` names; sets up logging.

    ``--help`` prints and exits. A setting that is unknown or out of range exits with status 2 and one
    line per fault.
    """
    argv, file = _take_config(list(argv), program)
    try:
        configured = _with_file(kind, file)
        source: CliSettingsSource[Any] = CliSettingsSource(configured, cli_prog_name=program)
        settings: SettingsType = CliApp.run(configured, cli_args=argv, cli_settings_source=source)
    except ValidationError as error:
        fail("\n".join(f"{program}: {_fault(fault)}" for fault in error.errors()) + f"\nSee `{program} --help`.")
    except (SettingsError, ValueError) as error:
        fail(f"{program}: {error}")
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return settings


def _with_file(kind: type[SettingsType], file: Path | None) -> type[SettingsType]:
    """The same settings, reading ``file`` too."""

    configured: type[SettingsType] = type(kind.__name__, (kind,), {"__doc__": kind.__doc__}, toml_file=file)
    return configured


def fail(message: str) -> NoReturn:
    """Prints a message to stderr and exits with the status of wrong usage."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(USAGE_ERROR)


def fail_with(error: PilotfishError, program: str) -> NoReturn:
    """Exits over an error that a person can mend."""
    fail(f"{program}: {error}")


def _fault(fault: ErrorDetails) -> str:
    name = "--" + ".".join(str(part) for part in fault["loc"]).replace("_", "-")
    given = "" if fault["type"] == "missing" else f" (given: {fault['input']!r})"
    return f"{name}: {fault['msg']}{given}"


def _take_config(argv: list[str], program: str) -> tuple[list[str], Path | None]:
    for index, flag in enumerate(argv):
        if flag == "--config" or flag.startswith("--config="):
            inline = flag.removeprefix("--config=") if "=" in flag else None
            if inline is None and index + 1 == len(argv):
                fail(f"{program}: --config needs a file")
            file = Path(inline if inline is not None else argv[index + 1])
            if not file.is_file():
                fail(f"{program}: --config is {file}, which is not a file")
            return argv[:index] + argv[index + (1 if inline is not None else 2) :], file
    return argv, None
