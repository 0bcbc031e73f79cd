"""``--version``, and completion as the shells themselves run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotfish.cli.main import app

BASH = """
source "$HOME/.bashrc"
complete -p pilotfish >/dev/null
COMP_WORDS=({words}); COMP_CWORD={last}
_pilotfish_completion pilotfish
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
autoload -Uz compinit && compinit -D -u
source "$HOME/.zshrc" 2>/dev/null
(( $+_comps[pilotfish] )) || exit 3
words=({words}); CURRENT=$#words
_arguments() {{ print -r -- "$1" }}
$_comps[pilotfish]  # the first time it only defines what completes from then on
$_comps[pilotfish]
"""


def test_version_is_printed_alone() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"pilotfish {version('pilotfish')}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("words", "found"), [("pilotfish gen", "generate"), ("pilotfish up --draft-l", "--draft-layers")]
)
def test_an_installed_completion_completes(shell: str, words: str, found: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    env = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}
    # Which shell asks is found out from the parent process.
    install = [path, "-c", "pilotfish --install-completion; exit $?"]
    installed = subprocess.run(install, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert installed.returncode == 0, installed.stderr
    script = {"bash": BASH, "zsh": ZSH}[shell].format(words=words, last=words.count(" "))
    done = subprocess.run([path, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert found in done.stdout
    assert "--replicas" not in done.stdout
