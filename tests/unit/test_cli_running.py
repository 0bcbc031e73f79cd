"""A server for the time of one command: how it is started."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from pilotfish.cli import running
from pilotfish.errors import UnavailableError


@pytest.mark.parametrize("flags", [[], ["--draft", "none", "--http", "127.0.0.1:9"]])
def test_it_serves_no_http_unless_that_is_asked_for(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def popen(argv: list[str], **_: Any) -> Any:
        started.append(argv)
        raise UnavailableError("that is all that is looked at")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(UnavailableError), running.running_server(flags):
        pass
    [argv] = started
    assert argv[argv.index("up") + 1 :] == ["--listen", "127.0.0.1:0", "--http", "off", *flags]
