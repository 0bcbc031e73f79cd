"""Build hook: generates ``pilotfish/v1`` from ``protos/``, for wheels and editable installs alike.

Run directly (``python hatch_build.py``) it only generates, for use after a ``.proto`` changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def generate(root: Path = ROOT) -> None:
    """Runs protoc over every file of ``protos/``; raises ``RuntimeError`` if it fails."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(root / "protos")) for path in (root / "protos").rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{root / 'protos'}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main([*arguments, *protos]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(protos)}; its message is above")


class ProtoBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it collects files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root))
        build_data["artifacts"] += ["pilotfish/v1/*_pb2*.py", "pilotfish/v1/*_pb2*.pyi"]


if __name__ == "__main__":
    generate()
