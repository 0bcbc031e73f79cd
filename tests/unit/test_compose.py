"""compose.yaml without Docker: what its variables become, and what the services' command lines then run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import CliApp

from draft_svc.server import DraftConfig
from orchestrator.server import OrchestratorSettings
from target_svc.server import TargetConfig

ROOT = Path(__file__).parents[2]
GPU, CPU = ("compose.yaml",), ("compose.yaml", "compose.cpu.yaml")
KINDS = {"target": TargetConfig, "draft": DraftConfig, "orchestrator": OrchestratorSettings}
PILOTFISH = """#!{python}
import json, sys
if sys.argv[1] == "pull":
    print(f"/models/{{sys.argv[2]}}")
else:
    print(json.dumps(sys.argv[1:]))
"""


class Reset:
    """``!reset null``: what an earlier file says is taken away."""


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!reset", lambda loader, node: Reset())


def merged(earlier: Any, later: Any) -> Any:
    """Two files' values, by Compose's rules for mappings; other values are replaced, ``!reset`` ones go."""
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    both = {key: merged(earlier.get(key), value) for key, value in later.items()}
    return {key: value for key, value in (earlier | both).items() if not isinstance(value, Reset)}


def interpolated(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    return expand(value, variables) if isinstance(value, str) else value


def expand(text: str, variables: dict[str, str]) -> str:
    """``$$``, ``${NAME-default}`` and ``${NAME:-default}`` with variables in the default, as Compose has them."""
    out = ""
    while match := re.search(r"\$(\$|\{)", text):
        out += text[: match.start()]
        if match[1] == "$":
            out, text = out + "$", text[match.end() :]
            continue
        end = closing(text, match.end())
        name, operator, default = re.fullmatch(r"(\w+)(:?-)?(.*)", text[match.end() : end], re.DOTALL).groups()  # type: ignore[union-attr]
        given = variables.get(name)
        is_given = given is not None and (given or operator != ":-")
        out += str(given) if is_given else expand(default, variables)
        text = text[end + 1 :]
    assert "$" not in text, "a bare $NAME would be Compose's, not the shell's"
    return out + text


def closing(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise AssertionError(f"no closing brace in {text!r}")


def services(files: tuple[str, ...], **variables: str) -> dict[str, Any]:
    config: Any = {}
    for name in files:
        read = yaml.load((ROOT / name).read_text(encoding="utf-8"), Loader)  # a subclass of SafeLoader
        config = merged(config, interpolated(read, variables))
    return dict(config["services"])


@pytest.fixture
def ran(tmp_path: Path) -> Any:
    """Runs a service's command as its container would, with a ``pilotfish`` that says how it was called."""
    (tmp_path / "pilotfish").write_text(PILOTFISH.format(python=sys.executable))
    (tmp_path / "pilotfish").chmod(0o755)

    def run(service: dict[str, Any]) -> list[str]:
        given = {name: value for name, value in service["environment"].items() if value is not None}
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
        done = subprocess.run(
            [*service["entrypoint"], *service["command"]], env=env, capture_output=True, text=True, check=True
        )
        return list(json.loads(done.stdout.splitlines()[-1]))

    return run


def flag(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize(
    ("files", "variables", "model", "layers", "quantize"),
    [
        (GPU, {}, "smollm2", "8", None),
        (CPU, {}, "smollm2", None, "int8"),
        (GPU, {"TARGET_MODEL": "big"}, "big", "8", None),
        (GPU, {"TARGET_MODEL": "big", "DRAFT_MODEL": "small"}, "small", None, None),
        (CPU, {"DRAFT_MODEL": "small"}, "small", None, None),
        (GPU, {"DRAFT_MODEL": "small", "DRAFT_FLAGS": "--layers 3"}, "small", "3", None),
        (GPU, {"DRAFT_FLAGS": "--layers 3"}, "smollm2", "3", None),
        (GPU, {"DRAFT_MODEL": "smollm2-mtp", "DRAFT_FLAGS": ""}, "smollm2-mtp", None, None),
    ],
)
def test_the_draft_has_the_flags_of_its_own_model(
    files: tuple[str, ...], variables: dict[str, str], model: str, layers: str | None, quantize: str | None, ran: Any
) -> None:
    argv = ran(services(files, **variables)["draft"])
    assert (flag(argv, "--model"), flag(argv, "--name")) == (f"/models/{model}", model)
    assert flag(argv, "--target-model") == f"/models/{variables.get('TARGET_MODEL', 'smollm2')}"
    assert (flag(argv, "--layers"), flag(argv, "--quantize")) == (layers, quantize)
    assert (flag(argv, "--drafter") == "model") == (not variables.keys() & {"DRAFT_MODEL", "DRAFT_FLAGS"})


@pytest.mark.parametrize("files", [GPU, CPU])
def test_the_services_take_the_flags_that_they_get(files: tuple[str, ...], ran: Any) -> None:
    found = services(files, TARGET_FLAGS="--features final", API_KEY="k")
    for name, kind in KINDS.items():
        command, *argv = ran(found[name])
        assert command == name
        settings = CliApp.run(kind, cli_args=argv, cli_exit_on_error=False)
        assert settings.listen.endswith(found[name]["healthcheck"]["test"][-1].rpartition(":")[2])
    assert flag(ran(found["target"]), "--features") == "final"


def test_only_the_target_is_waited_for() -> None:
    found = services(GPU)
    conditions = {name: each["condition"] for name, each in found["orchestrator"]["depends_on"].items()}
    assert conditions == {"target": "service_healthy", "draft": "service_started"}


def test_a_host_without_gpus_reserves_none() -> None:
    gpu, cpu = services(GPU, DRAFT_GPU="3"), services(CPU)
    device = gpu["draft"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["device_ids"] == ["3"]
    assert "deploy" not in cpu["target"] | cpu["draft"]


def test_the_image_is_given_all_that_it_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = [*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "protos", "hatch_build.py", "heads"]
    assert {f"!{name}" for name in sources} <= set(ignored)
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "COPY heads heads" in dockerfile
    assert '["optional-dependencies"]["serve"]' in dockerfile
