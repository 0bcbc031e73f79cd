"""What the wheels hold, and what the main one does without extras, in an environment of its own.

Building takes hatchling and grpcio-tools from this environment; installing takes the dependencies of the SDK from the
package index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment

from pilotfish.checkpoints.pull import HEADS
from pilotfish.runtime.loading import LoadedModel

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "xgrammar", "fastapi", "pydantic-settings", "huggingface-hub", "unearth")
CONVERSATION = """
import asyncio, sys
from pilotfish import AsyncClient, Client, PilotfishError, SamplingParams
with Client(sys.argv[1]) as client:
    completion = client.generate("It is a truth", SamplingParams(max_tokens=4))
print(completion.usage.completion_tokens)
print(sorted(name for name in ("torch", "pydantic_settings", "fastapi") if name in sys.modules))
"""
TYPED = """
from pilotfish import Client, Completion, SamplingParams

with Client("127.0.0.1:50050") as client:
    completion: Completion = client.generate("x", SamplingParams(max_tokens=4))
    reveal_type(completion.usage.rounds)
    client.generate("x", SamplingParams(max_tokens="four"))
"""

pytestmark = pytest.mark.slow


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    away = tempfile.gettempdir()  # python would import from the repository if it were run there
    return subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=300, check=False, cwd=away)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, built as they would be published, by the name of the project."""
    out = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, ROOT / "heads"):
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, project]
        built = run(sys.executable, "-m", "pip", *build)
        assert built.returncode == 0, built.stderr
    return {path.name.partition("-")[0]: path for path in out.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a fresh environment with the main wheel, without extras."""
    place = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", place)
    assert made.returncode == 0, made.stderr
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    installed = run(*pip, wheels["pilotfish"])
    assert installed.returncode == 0, installed.stderr
    return place / "bin"


@pytest.fixture
def server(tiny_folder: Path, tiny_target: LoadedModel) -> Iterator[str]:
    with Deployment(tiny_folder, tiny_target) as deployment:
        yield deployment.address


def test_drafts_come_in_a_wheel_of_their_own(wheels: dict[str, Path]) -> None:
    main, heads = (set(zipfile.ZipFile(wheels[name]).namelist()) for name in ("pilotfish", "pilotfish_heads"))
    assert {f"pilotfish_heads/{name}/model.safetensors" for name in HEADS} <= heads
    assert not any(name.endswith(".safetensors") or "heads/" in name for name in main)
    assert wheels["pilotfish"].stat().st_size < 3e6
    assert {"pilotfish/py.typed", "pilotfish/v1/generation_pb2.pyi", "target_svc/server.py"} <= main


def test_the_sdk_brings_no_packages_that_run_models(environment: Path) -> None:
    listed = run(environment / "python", "-m", "pip", "list", "--format", "freeze").stdout
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines()}
    assert {"pilotfish", "grpcio", "protobuf", "typer", "rich"} <= names
    assert not names.intersection(HEAVY)


def test_sdk_and_commands_ask_a_server_without_extras(environment: Path, server: str) -> None:
    asked = run(environment / "python", "-c", CONVERSATION, server)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "4\n[]\n", "")
    shown = run(environment / "pilotfish", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "generate" in shown.stdout
    generated = run(environment / "pilotfish", "generate", "It is a truth", "--max-tokens", "4", "--server", server)
    assert generated.returncode == 0, generated.stderr
    assert "4 tokens" in generated.stderr
    measured = run(environment / "pilotfish", "bench", "--requests", "1", "--max-tokens", "4", "--server", server)
    assert measured.returncode == 0, measured.stderr
    assert run(environment / "pilotfish", "health", server).stdout == "serving\n"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["pilotfish", "up"], "serve"),
        (["pilotfish", "demo"], "serve"),
        (["pilotfish", "check"], "serve"),
        (["pilotfish", "pull", "owner/model"], "serve"),
        (["pilotfish", "target", "--model", "m"], "serve"),
        (["python", "-m", "target_svc", "--model", "m"], "serve"),
        (["pilotfish", "bench", "--out", "o"], "bench"),
        (["pilotfish", "pull", "smollm2-mtp"], "heads"),
    ],
)
def test_a_command_that_needs_an_extra_says_which(environment: Path, command: list[str], extra: str) -> None:
    done = run(environment / command[0], *command[1:])
    assert done.returncode in (1, 2)
    [line] = done.stderr.strip().splitlines()
    assert f"pip install 'pilotfish[{extra}]'" in line


def test_the_sdk_is_typed_for_those_who_use_it(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment / "python", "--config-file", ""]
    found = run(*mypy, "--cache-dir", tmp_path / "cache", tmp_path / "used.py")
    assert 'Revealed type is "int"' in found.stdout.replace("builtins.", "")
    assert "[arg-type]" in found.stdout
    assert found.stdout.strip().endswith("Found 1 error in 1 file (checked 1 source file)")
