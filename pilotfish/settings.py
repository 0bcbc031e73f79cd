"""How every service reads its settings: flags, then environment, then a file, checked in one place.

A service declares one frozen subclass of ``Settings`` with a docstring under each field, and calls
``load``. Flags are in kebab case (``--max-rows``), environment variables upper case with the
service's prefix, the file is TOML and named by ``--config FILE``. A name that no setting has is
refused wherever it stands.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, ValidationError
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

from pilotfish import logs
from pilotfish.addresses import read_address
from pilotfish.errors import InvalidArgumentError, PilotfishError

log = logging.getLogger(__name__)

SettingsType = TypeVar("SettingsType", bound="Settings")

USAGE_ERROR = 2
_METAVARS = {
    "str": "TEXT",
    "int": "N",
    "float": "X",
    "Path": "PATH",
    "list[str]": "TEXT",
    "list[SecretStr]": "TEXT",
    "{auto,int}": "auto|N",
    "{{auto,off},int}": "auto|N|off",
}
_PREFIX = re.compile(r"^(Value error|Assertion failed), ")
_NOT_A_DEFAULT = re.compile(r" \(default: (null)?\)| \(default factory: \w+\)")
# Kubernetes describes every service of a namespace to every container so; it knows nothing of our settings.
_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?")


def address(value: str, *, to_listen: bool = False) -> str:
    """For validators: see ``read_address``."""
    try:
        return read_address(value, "address", to_listen=to_listen)
    except InvalidArgumentError as error:
        raise ValueError(error.limit) from error


Address = Annotated[str, AfterValidator(address)]
"""HOST:PORT or a port, to connect to."""

ListenAddress = Annotated[str, AfterValidator(partial(address, to_listen=True))]
"""The same, to listen on; port 0 takes a free one."""


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

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged, to stderr."""

    log_format: logs.Format = "text"
    """Lines for people, or json: an object a line, with the numbers of a line under names of their own."""

    log_times: bool = True
    """Start log lines with date, time and module; off where something else stamps them. JSON lines always have them."""

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
    """``read``, and sets up logging."""
    settings = read(kind, argv, program)
    service = program.removeprefix("pilotfish ")
    logs.set_up(settings.log_level, settings.log_format, times=settings.log_times, service=service)
    return settings


def read(kind: type[SettingsType], argv: Sequence[str], program: str) -> SettingsType:
    """Settings from ``argv``, the environment and the file that ``--config`` names.

    ``--help`` prints and exits. A setting that is unknown or out of range exits with status 2 and one
    line per fault, which names it as it was given: flag, variable or key of the file.
    """
    argv, file = _take_config(list(argv), program)
    given = _Given(kind, argv, file, _read(file, program))
    if not {"-h", "--help"} & set(argv) and (faults := [f"{program}: {fault}" for fault in given.unknown()]):
        fail("\n".join(faults) + f"\nSee `{program} --help`.")
    configured = _documented(kind, file)
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            configured, cli_prog_name=program, cli_exit_on_error=False, formatter_class=_Help
        )
        settings: SettingsType = CliApp.run(configured, cli_args=argv, cli_settings_source=source)
    except ValidationError as error:
        faults = [f"{program}: {given.fault(fault)}" for fault in error.errors()]
        fail("\n".join(faults) + f"\nSee `{program} --help`.")
    except (SettingsError, ValueError) as error:
        fail(f"{program}: {str(error).removeprefix('error parsing CLI: ')}\nSee `{program} --help`.")
    return settings


def fail(message: str) -> NoReturn:
    """Prints a message to stderr and exits with the status of wrong usage."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(USAGE_ERROR)


def fail_with(error: PilotfishError, program: str) -> NoReturn:
    """Exits over an error that a person can mend; told in the form of the log."""
    if logs.is_json():
        log.error("%s", error)
        raise SystemExit(USAGE_ERROR)
    fail(f"{program}: {error}")


@dataclass(frozen=True)
class _Given:
    """Where settings were given; knows them by the names that a person wrote."""

    kind: type[Settings]
    argv: list[str]
    file: Path | None
    keys: dict[str, Any]
    """Of the file."""

    def unknown(self) -> list[str]:
        """What to say about each name that no setting has."""
        fields = self.kind.model_fields
        flags = [*map(_flag, fields), "--config", "--help"]
        flags += [f"--no-{_flag(name)[2:]}" for name, field in fields.items() if field.annotation is bool]
        variables = [self._variable(name) for name in fields]
        given = [part.partition("=")[0] for part in self.argv if part.startswith("--")]
        faults = [f"{name} is no flag{_hint(name, flags, '--')}" for name in given if name not in flags]
        faults += [
            f"{name} in the environment is no setting{_hint(name.upper(), variables, self.prefix)}"
            for name in sorted(os.environ)
            if self._is_ours(name.upper()) and name.upper() not in variables
        ]
        faults += [
            f"{name} in {self.file} is no setting{_hint(name, fields)}" for name in self.keys if name not in fields
        ]
        return faults

    def fault(self, fault: ErrorDetails) -> str:
        """What to say about a value that was refused."""
        name = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "missing":
            return f"{_flag(name)} is missing; give it, or {self._variable(name)} in the environment"
        return f"{self._where(name)}: {said_of(fault)} (given: {fault['input']!r})"

    @property
    def prefix(self) -> str:
        return str(self.kind.model_config.get("env_prefix", "")).upper()

    def _where(self, name: str) -> str:
        if any(part.partition("=")[0] == _flag(name) for part in self.argv):
            return _flag(name)
        if self._variable(name) in map(str.upper, os.environ):
            return self._variable(name)
        return f"{name} in {self.file}" if name in self.keys else _flag(name)

    def _is_ours(self, variable: str) -> bool:
        """Whether the variable is meant for this service."""
        if not self.prefix or not variable.startswith(self.prefix):
            return False
        return not _KUBERNETES.fullmatch(variable.removeprefix(self.prefix))

    def _variable(self, name: str) -> str:
        return self.prefix + name.upper()


def said_of(fault: ErrorDetails) -> str:
    """What is wrong, without what pydantic puts before the words of validators of ours."""
    return _PREFIX.sub("", fault["msg"])


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names values by what a person types, and shows no default where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return _NOT_A_DEFAULT.sub("", action.help) if action.help else action.help

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = super()._format_args(action, default_metavar)
        return _METAVARS.get(metavar, metavar)


def _documented(kind: type[SettingsType], file: Path | None) -> type[SettingsType]:
    """The same settings, reading ``file`` too, and with help on where they come from."""
    prefix = kind.model_config.get("env_prefix", "")
    description = inspect.cleandoc(kind.__doc__ or "") + (
        "\n\nOptions are taken from flags, then from the environment"
        f' ({prefix}LOG_LEVEL=debug),\nthen from a TOML file: --config FILE (log_level = "debug").'
    )
    configured: type[SettingsType] = type(kind.__name__, (kind,), {"__doc__": description}, toml_file=file)
    return configured


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Names the known name that ``name`` is like but for the prefix that all share; empty if none is."""
    found = get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _read(file: Path | None, program: str) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{program}: --config is {file}, which cannot be read as TOML: {error}")


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
