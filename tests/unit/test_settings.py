"""Settings of a service: where they come from, which source wins, and what is refused, by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import SettingsConfigDict

from pilotfish.settings import Address, ListenAddress, Settings, load


class Aquarium(Settings):
    """Keeps fish.

    It needs no sea.
    """

    model_config = SettingsConfigDict(env_prefix="AQUARIUM_")

    model: Path
    """Where the fish come from."""

    pages: int = Field(8, ge=1, le=64)
    """Fish at most."""

    ratio: float = Field(0.5, gt=0)
    """Water to fish."""

    name: str | None = None
    """On the door."""

    title: str = ""
    """Below the name."""

    draft: list[str] = Field(default_factory=list)
    """Neighbours."""

    salty: bool = False
    """Sea water."""


def _checked_door(value: object) -> object:
    if value not in ("left", "right"):
        raise ValueError("must be left or right")
    return value


class Pond(Settings):
    """Has validators."""

    door: Annotated[str, BeforeValidator(_checked_door)] = "left"
    """Way in."""

    pipe: Address = "127.0.0.1:1"
    """Where water comes from."""

    drain: ListenAddress = "0"
    """Where it goes."""


def read(*argv: str) -> Aquarium:
    return load(Aquarium, ["--model", "m", *argv], "aquarium")


def read_pond(*argv: str) -> Pond:
    return load(Pond, argv, "pond")


def refused(capsys: pytest.CaptureFixture[str], *argv: str, read: Callable[..., Settings] = read) -> list[str]:
    """The lines on stderr of a start that fails."""
    with pytest.raises(SystemExit) as stop:
        read(*argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "aquarium.toml"


SEE = "See `aquarium --help`."


# sources


def test_flags_set_every_field() -> None:
    flags = "--pages 9 --ratio=0.25 --name n --title t --draft a:1 --draft b:2 --salty"
    flags += " --log-level debug --log-format json --no-log-times"
    assert read(*flags.split()).model_dump() == {
        "model": Path("m"), "pages": 9, "ratio": 0.25, "name": "n", "title": "t", "draft": ["a:1", "b:2"],
        "salty": True, "log_level": "debug", "log_format": "json", "log_times": False,
    }  # fmt: skip


def test_the_environment_sets_fields_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUARIUM_PAGES", "11")
    monkeypatch.setenv("AQUARIUM_SALTY", "true")
    monkeypatch.setenv("AQUARIUM_DRAFT", '["a:1"]')
    monkeypatch.setenv("PAGES", "12")
    settings = read()
    assert (settings.pages, settings.salty, settings.draft) == (11, True, ["a:1"])


def test_a_file_sets_fields(file: Path) -> None:
    file.write_text('pages = 13\ndraft = ["a:1", "b:2"]\nname = "n"\n')
    for flags in (["--config", str(file)], [f"--config={file}"]):
        settings = read(*flags)
        assert (settings.pages, settings.draft, settings.name) == (13, ["a:1", "b:2"], "n")


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('pages = 1\nratio = 1\ntitle = "file"\n')
    monkeypatch.setenv("AQUARIUM_PAGES", "2")
    monkeypatch.setenv("AQUARIUM_RATIO", "2")
    settings = read("--config", str(file), "--pages", "3")
    assert (settings.pages, settings.ratio, settings.title) == (3, 2.0, "file")


def test_settings_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().pages = 2


# unknown names


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--page", "3"], ["aquarium: --page is no flag; did you mean --pages?"]),
        (["--pagez=3"], ["aquarium: --pagez is no flag; did you mean --pages?"]),
        (["--no-log-time"], ["aquarium: --no-log-time is no flag; did you mean --no-log-times?"]),
        (["--no-pages"], ["aquarium: --no-pages is no flag; did you mean --pages?"]),
        (["--warp"], ["aquarium: --warp is no flag"]),
        (["--warp", "--page"], ["aquarium: --warp is no flag", "aquarium: --page is no flag; did you mean --pages?"]),
        (["extra"], ["aquarium: unrecognized arguments: extra"]),
        (["-x"], ["aquarium: unrecognized arguments: -x"]),
        (["--pages"], ["aquarium: argument --pages: expected one argument"]),
    ],
)
def test_unknown_flags_are_refused_by_name(
    argv: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *argv) == [*lines, SEE]


def test_unknown_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AQUARIUM_PAGE", "3")
    monkeypatch.setenv("AQUARIUM_WARP", "3")
    monkeypatch.setenv("aquarium_titel", "x")
    assert refused(capsys) == [
        "aquarium: AQUARIUM_PAGE in the environment is no setting; did you mean AQUARIUM_PAGES?",
        "aquarium: AQUARIUM_WARP in the environment is no setting",
        "aquarium: aquarium_titel in the environment is no setting; did you mean AQUARIUM_TITLE?",
        SEE,
    ]


def test_other_variables_are_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["OTHER_PAGE", "AQUARIUMS_PAGE", "AQUARIUM"]
    # Kubernetes sets these in every container of a namespace with a service called `aquarium`.
    others += ["AQUARIUM_SERVICE_HOST", "AQUARIUM_SERVICE_PORT", "AQUARIUM_SERVICE_PORT_GRPC", "AQUARIUM_PORT"]
    others += ["AQUARIUM_PORT_50051_TCP", "AQUARIUM_PORT_50051_TCP_ADDR", "AQUARIUM_PORT_50051_TCP_PROTO"]
    for name in others:
        monkeypatch.setenv(name, "tcp://10.0.0.1:50051")
    assert read().pages == 8


def test_unknown_keys_of_the_file_are_refused_by_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("page = 3\n[warp]\nspeed = 9\n")
    assert refused(capsys, "--config", str(file)) == [
        f"aquarium: page in {file} is no setting; did you mean pages?",
        f"aquarium: warp in {file} is no setting",
        SEE,
    ]


# values


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pages", "0"], ["--pages: ", "greater than or equal to 1", "(given: '0')"]),
        (["--pages", "65"], ["--pages: ", "less than or equal to 64", "(given: '65')"]),
        (["--pages=x"], ["--pages: ", "valid integer", "(given: 'x')"]),
        (["--ratio", "0"], ["--ratio: ", "greater than 0", "(given: '0')"]),
        (["--salty=maybe"], ["--salty"]),
        (["--log-level", "loud"], ["--log-level: ", "'debug', 'info', 'warning' or 'error'", "(given: 'loud')"]),
    ],
)
def test_flags_out_of_range_are_refused(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line, see = refused(capsys, *argv)
    assert line.startswith("aquarium: ")
    assert all(word in line for word in words)
    assert see == SEE


def test_a_fault_is_named_as_it_was_given(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("ratio = -1\npages = 4\n")
    monkeypatch.setenv("AQUARIUM_PAGES", "many")
    pages, ratio, _ = refused(capsys, "--config", str(file))
    assert pages.startswith("aquarium: AQUARIUM_PAGES: ")
    assert pages.endswith("(given: 'many')")
    assert ratio.startswith(f"aquarium: ratio in {file}: ")
    assert ratio.endswith("(given: -1)")


def test_a_validator_has_the_word_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    fault = refused(capsys, "--door", "up", read=read_pond)[0]
    assert fault == "pond: --door: must be left or right (given: 'up')"


def test_addresses_are_read_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_pond("--pipe", "8000", "--drain", ":9")
    assert (settings.pipe, settings.drain) == ("127.0.0.1:8000", "0.0.0.0:9")
    wanted = "it must be HOST:PORT or a port, such as 127.0.0.1:50050"
    for flag in ("--pipe", "--drain"):
        fault = refused(capsys, flag, "host:80a", read=read_pond)[0]
        assert fault == f"pond: {flag}: {wanted} (given: 'host:80a')"
    fault = refused(capsys, "--pipe", "http://host:80", read=read_pond)[0]
    assert fault.endswith("and no URL: try host:80 (given: 'http://host:80')")


def test_every_fault_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Aquarium, ["--pages", "0", "--ratio", "-1"], "aquarium")
    lines = capsys.readouterr().err.splitlines()
    assert "aquarium: --model is missing; give it, or AQUARIUM_MODEL in the environment" in lines
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("pages ; 3", "cannot be read as TOML: Expected '='"),
        (b"\xff\xfe", "cannot be read as TOML: 'utf-8' codec"),
        (None, "which is not a file"),
    ],
)
def test_a_file_that_cannot_be_read(
    content: str | bytes | None, words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (line,) = refused(capsys, "--config", str(file))
    assert line.startswith(f"aquarium: --config is {file}, ")
    assert words in line


def test_config_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--config") == ["aquarium: --config needs a file"]


# help and logging


def test_help_shows_docstrings_and_where_settings_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("AQUARIUM_WARP", "9")  # who asks for help may have to find out about this
    with pytest.raises(SystemExit) as stop:
        load(Aquarium, ["--help"], "aquarium")
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert "\nKeeps fish.\n\nIt needs no sea.\n" in told
    assert "(AQUARIUM_LOG_LEVEL=debug)" in told
    assert "--config FILE" in told
    lines = [" ".join(line.split()) for line in told.splitlines()]
    for line in (
        "--model PATH Where the fish come from. (required)",
        "--pages N Fish at most. (default: 8)",
        "--ratio X Water to fish. (default: 0.5)",
        "--name TEXT On the door.",
        "--title TEXT Below the name.",
        "--draft TEXT Neighbours.",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ([], r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING tank: wet\n"),
        (["--no-log-times"], r"WARNING: wet\n"),
        (["--log-format", "json", "--no-log-times"], r'\{"time": "[-:.T\d]+\+00:00", "level": "warning", .*\}\n'),
        (["--log-level", "error"], ""),
    ],
)
def test_how_lines_are_logged(flags: list[str], pattern: str) -> None:
    code = "import logging, sys; from pilotfish.settings import Settings, load; load(Settings, sys.argv[1:], 'p'); "
    code += "logging.getLogger('tank').warning('wet')"
    argv = [sys.executable, "-c", code, *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert re.fullmatch(pattern, done.stderr)


def logged_as_json(code: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of Python with logging as JSON, and the lines of its stderr, all of which are JSON."""
    begin = "import logging, sys; from pilotfish.settings import Settings, fail_with, load; "
    begin += "from pilotfish.logs import fields; load(Settings, sys.argv[1:], 'pilotfish tank')\n"
    argv = [sys.executable, "-c", begin + code, "--log-format", "json", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_json_lines_have_what_a_line_says_under_names() -> None:
    code = "logging.getLogger('a.b').info('%s fish\\n', 3, extra=fields(count=3, at=object, name='\\ud800'))"
    status, (line,) = logged_as_json(code)
    assert status == 0
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    expected = {"level": "info", "service": "tank", "logger": "a.b", "message": "3 fish\n", "count": 3}
    assert line == expected | {"at": "<class 'object'>", "name": "\ud800"}
    assert logged_as_json("logging.getLogger('a').info('x')", "--log-level", "warning") == (0, [])


@pytest.mark.parametrize(
    ("code", "status", "level", "message"),
    [
        ("raise ValueError('leak')", 1, "critical", "ValueError ended it"),
        ("import warnings; warnings.warn('a leak')", 0, "warning", "UserWarning: a leak"),
        ("from pilotfish.errors import NotFoundError; fail_with(NotFoundError('no fish'), 'x')", 2, "error", "no fish"),
        ("try: 1 / 0\nexcept Exception: logging.getLogger('a').exception('dry')", 0, "error", "dry"),
    ],
)
def test_what_goes_wrong_is_json_too(code: str, status: int, level: str, message: str) -> None:
    found, (line,) = logged_as_json(code)
    assert (found, line["level"]) == (status, level)
    assert message in line["message"]
    if "exception" in line:
        assert line["exception"].startswith("Traceback")
