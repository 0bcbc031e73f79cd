"""Who may import whom (DESIGN.md section 8), from the syntax trees, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("pilotfish", "draft_svc", "target_svc", "orchestrator")

# What each of our packages may import of ours beside itself. The longest name that fits a module counts.
COMMON = ("pilotfish.errors", "pilotfish.noise", "pilotfish.steps")
WIRE = ("pilotfish.rpc", "pilotfish.v1")
WORKER = (*COMMON, *WIRE, "pilotfish.logs", "pilotfish.runtime", "pilotfish.simulate")
SERVICE = ("pilotfish.extras", "pilotfish.settings", "pilotfish.tokenizer_hash")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "pilotfish.addresses": ("pilotfish.errors",),
    "pilotfish.cores": (),
    "pilotfish.errors": (),
    "pilotfish.extras": ("pilotfish.errors",),
    "pilotfish.noise": (),
    "pilotfish.steps": ("pilotfish.errors",),
    "pilotfish.logs": (),
    "pilotfish.settings": ("pilotfish.addresses", "pilotfish.errors", "pilotfish.logs"),
    "pilotfish.tokenizer_hash": ("pilotfish.errors",),
    "pilotfish.token_bytes": (),
    "pilotfish.v1": (),
    "pilotfish.rpc": (*COMMON, "pilotfish.addresses", "pilotfish.v1"),
    "pilotfish.client": ("pilotfish.addresses", "pilotfish.errors", *WIRE),
    "pilotfish.runtime": (
        *COMMON,
        "pilotfish.cores",
        "pilotfish.rpc",
        "pilotfish.settings",
        "pilotfish.tokenizer_hash",
        "pilotfish.token_bytes",
    ),
    "pilotfish.simulate": (*COMMON, "pilotfish.runtime", "pilotfish.tokenizer_hash"),
    "pilotfish.checkpoints": ("pilotfish.errors", "pilotfish.extras"),
    "pilotfish.bench": ("pilotfish.client", "pilotfish.cores", "pilotfish.errors"),
    "pilotfish.check": ("pilotfish.bench", "pilotfish.client", "pilotfish.errors", "pilotfish.noise"),
    "pilotfish.cli": ("pilotfish", "draft_svc", "target_svc", "orchestrator"),  # starts them all
    "pilotfish": ("pilotfish.client", "pilotfish.errors", "pilotfish.cli"),
    "orchestrator.core": COMMON,
    "orchestrator": (*COMMON, *WIRE, *SERVICE, "pilotfish.addresses", "pilotfish.logs", "pilotfish.token_bytes"),
    "draft_svc": (*WORKER, *SERVICE),
    "target_svc": (*WORKER, *SERVICE),
}

# grpc and generated code appear only in files of these names and in these packages.
GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.protobuf", "google.rpc", "pilotfish.v1")
GRPC_FILES = ("service.py", "workers.py", "server.py")
GRPC_PACKAGES = ("pilotfish.client", "pilotfish.rpc")

# Packages that must not appear: (importer, import).
NEVER: tuple[tuple[str, str], ...] = (
    ("orchestrator", "torch"),
    ("orchestrator", "transformers"),
    ("pilotfish.client", "torch"),
    ("pilotfish.client", "numpy"),
    ("pilotfish.rpc", "torch"),
    ("pilotfish.steps", "torch"),
    ("pilotfish.simulate", "torch"),
)

# Modules that import by a computed name: the SDK looks its classes up when first used, the CLI its services.
COMPUTED = ("pilotfish", "pilotfish.cli.services")

# The pure core: these and ours, nothing else.
CORE = "orchestrator.core"
CORE_MAY_IMPORT = (
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "numpy",
    "operator",
    "typing",
)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def modules() -> Iterator[tuple[str, Path]]:
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith("pilotfish.v1"):
                yield name, path


def imports_of(source: str, name: str) -> Iterator[tuple[str, bool]]:
    """Every module that the source imports, and whether only for type checkers.

    ``from a import b`` counts as ``a.b``, so that a submodule is seen as what it is.
    """
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively; write the whole name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in for_types
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value), False
            else:
                assert name in COMPUTED, f"{name} imports a module by a computed name"


def rule_of(module: str) -> str:
    fitting = [package for package in MAY_IMPORT if within(module, (package,))]
    assert fitting, f"{module} has no rule; add one to MAY_IMPORT"
    return max(fitting, key=len)


def faults(module: str, source: str, file_name: str) -> list[str]:
    """What a module imports against the rules."""
    found = []
    package = rule_of(module)
    for imported, only_for_types in imports_of(source, module):
        if within(imported, OURS):
            # "pilotfish" itself holds every package, so what it may import is listed in full.
            is_own = package != "pilotfish" and within(imported, (package,))
            if not is_own and not within(imported, MAY_IMPORT[package]):
                found.append(f"{module} imports {imported}; {package} may import {MAY_IMPORT[package]}")
        elif within(module, (CORE,)) and not within(imported, CORE_MAY_IMPORT):
            found.append(f"{module} imports {imported}; the core is pure")
        if within(imported, GRPC) and file_name not in GRPC_FILES and not within(module, GRPC_PACKAGES):
            found.append(f"{module} imports {imported}; grpc belongs into {GRPC_FILES} and {GRPC_PACKAGES}")
        if not only_for_types and any(within(module, (a,)) and within(imported, (b,)) for a, b in NEVER):
            found.append(f"{module} imports {imported}; it must run without")
    return found


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_keep_to_the_rules(module: str, path: Path) -> None:
    assert faults(module, path.read_text(encoding="utf-8"), path.name) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("orchestrator.loop", "def f():\n    import torch"),
        ("orchestrator.loop", "from torch import nn"),
        ("orchestrator.loop", "import importlib\nimportlib.import_module('transformers')"),
        ("orchestrator.loop", "import grpc"),
        ("orchestrator.loop", "from pilotfish.v1 import types_pb2"),
        ("orchestrator.loop", "from pilotfish import v1"),
        ("orchestrator.loop", "from draft_svc import engine"),
        ("orchestrator.loop", "from pilotfish.runtime.cache import KVCache"),
        ("orchestrator.core.pages", "import asyncio"),
        ("orchestrator.core.pages", "import time"),
        ("orchestrator.core.pages", "import random"),
        ("orchestrator.core.pages", "from orchestrator import loop"),
        ("orchestrator.core.pages", "from pilotfish.rpc import codec"),
        ("draft_svc.engine", "import target_svc"),
        ("target_svc.engine", "from orchestrator.core import acceptance"),
        ("pilotfish.client.aio", "from pilotfish.steps import TokenRows"),
        ("pilotfish.runtime.cache", "import draft_svc.engine"),
        ("pilotfish", "import pilotfish.runtime"),
    ],
)
def test_the_check_finds_what_breaks_the_rules(module: str, source: str) -> None:
    assert faults(module, source, "file.py")


@pytest.mark.parametrize("source", ["from . import loop", "import importlib\nimportlib.import_module(name)"])
def test_imports_that_hide_what_they_import_are_refused(source: str) -> None:
    with pytest.raises(AssertionError):
        faults("orchestrator.loop", source, "loop.py")


def test_the_check_lets_pass_what_keeps_to_the_rules() -> None:
    assert faults("orchestrator.loop", "from orchestrator.core import pages\nimport asyncio, numpy", "loop.py") == []
    assert faults("orchestrator.service", "import grpc\nfrom pilotfish.v1 import types_pb2", "service.py") == []
    assert faults("orchestrator.core.pages", "from pilotfish.steps import Ints", "pages.py") == []


def test_sdk_orchestrator_and_simulated_workers_run_without_torch() -> None:
    light = ("orchestrator", "pilotfish.client", "pilotfish.simulate", "pilotfish.runtime.worker")
    names = ["pilotfish", *(name for name, _ in modules() if within(name, light))]
    names += [f"{kind}.{name}" for kind in ("draft_svc", "target_svc") for name in ("server", "service")]
    names += ["target_svc.simulated", "draft_svc.drafters.simulated", "draft_svc.engine"]
    names = [name for name in names if not name.endswith("__main__")]
    assert "orchestrator.tokenizer" in names
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
loaded = sorted({{"torch", "transformers"}} & sys.modules.keys())
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
