"""Child processes: ready, their words, their death, and how they are stopped."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rich.console import Console

from pilotfish.cli import console, relay
from pilotfish.cli.children import Child, ChildDiedError, start, stop

READY_AT_ONCE = "print('ready x 127.0.0.1:7', flush=True); "
READY = "import time; " + READY_AT_ONCE
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def run(
    code: str, use: Callable[[Child], Coroutine[Any, Any, Any]], env: dict[str, str] | None = None
) -> tuple[Any, list[tuple[str, str]]]:
    """Starts Python with ``code``, runs ``use`` on it, and gives its result and all that was logged."""
    said: list[tuple[str, str]] = []

    async def main() -> Any:
        child = await start(
            "kid", [sys.executable, "-c", code], env or {}, lambda name, line: said.append((name, line))
        )
        try:
            return await use(child)
        finally:
            await stop([child], 0.3)

    return asyncio.run(main()), said


async def address(child: Child) -> str:
    return await child.ready


async def death(child: Child) -> str:
    await child.ended
    return str(child.death())


def test_the_ready_line_gives_the_address_and_is_not_logged() -> None:
    result, said = run("print('hello'); " + READY + "time.sleep(60)", address)
    assert result == "127.0.0.1:7"
    assert said == [("kid", "hello")]


def test_the_ready_line_may_say_more() -> None:
    async def more(child: Child) -> dict[str, str]:
        await child.ready
        return child.also

    result, said = run("import time; print('ready x 127.0.0.1:7 http=[::1]:8 a=b', flush=True); time.sleep(60)", more)
    assert (result, said) == ({"http": "[::1]:8", "a": "b"}, [])


def test_only_stdout_says_ready() -> None:
    code = "import sys; print('ready x 127.0.0.1:8', file=sys.stderr, flush=True); "
    result, said = run(code + READY + "time.sleep(60)", address)
    assert result == "127.0.0.1:7"
    assert said == [("kid", "ready x 127.0.0.1:8")]


def test_a_child_that_dies_before_ready_fails_with_its_last_lines() -> None:
    with pytest.raises(ChildDiedError, match=r"kid exited with 3; its last lines:\n  no such model"):
        run("import sys; print('no such model', file=sys.stderr); sys.exit(3)", address)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(0)", "kid exited with 0 without a word"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "kid was killed by SIGKILL without a word"),
        (
            "for i in range(40): print(i)",
            "kid exited with 0; its last lines:" + "".join(f"\n  {i}" for i in range(25, 40)),
        ),
    ],
)
def test_how_it_died(code: str, message: str) -> None:
    assert run(code, death)[0] == message


def test_what_a_death_before_ready_tells_is_not_logged_beside_it() -> None:
    message, said = run("for i in range(18): print(i)", death)
    assert said == [("kid", "0"), ("kid", "1"), ("kid", "2")]
    assert message.split("\n  ")[1:] == [str(i) for i in range(3, 18)]


def test_what_was_said_before_ready_is_logged_when_it_is_stopped() -> None:
    async def stopped(child: Child) -> None:
        for _ in range(1000):
            if child._last:
                break
            await asyncio.sleep(0.01)
        assert not child.ready.done()

    assert run("import time; print('loading', flush=True); time.sleep(60)", stopped)[1] == [("kid", "loading")]


def test_a_progress_bar_shows_its_last_state() -> None:
    code = READY_AT_ONCE + "import sys; sys.stderr.write('1%\\r50%\\r100%\\nand no line end')"
    assert run(code, death)[1] == [("kid", "100%"), ("kid", "and no line end")]


def test_very_long_lines_and_broken_characters_pass() -> None:
    code = READY_AT_ONCE + "import sys; sys.stdout.buffer.write(b'x' * 300000 + b'\\xff' + '\\u00e9'.encode() + b'\\n')"
    assert run(code, death)[1] == [("kid", "x" * 300000 + "\ufffd\u00e9")]


def test_the_environment_is_added_to() -> None:
    code = READY_AT_ONCE + "import os; print(os.environ['OURS'], 'PATH' in os.environ)"
    assert run(code, death, {"OURS": "1"})[1] == [("kid", "1 True")]


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async def stubborn(child: Child) -> None:
        await child.ready
        await stop([child], 0.2)
        assert "killed by SIGKILL" in str(child.death())

    run(STUBBORN + READY + "time.sleep(60)", stubborn)


def test_a_grandchild_that_holds_the_pipe_does_not_delay_the_report() -> None:
    code = READY_AT_ONCE
    code += (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)']); print('bye')"
    )

    async def timely(child: Child) -> str:
        async with asyncio.timeout(4):
            return await death(child)

    assert run(code, timely) == ("kid exited with 0; its last lines:\n  bye", [("kid", "bye")])


def test_children_stop_one_after_the_other() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        code = (
            "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
            + READY
            + "time.sleep(60)"
        )

        async def note(child: Child) -> None:
            await child.ended
            order.append(child.name)

        children = [await start(name, [sys.executable, "-c", code], {}, lambda *_: None) for name in ("a", "b", "c")]
        await asyncio.gather(*(child.ready for child in children))
        notes = [asyncio.create_task(note(child)) for child in children]
        await stop([children[2], children[0], children[1]], 10)
        await asyncio.gather(*notes)
        return order

    assert asyncio.run(main()) == ["c", "a", "b"]


def test_what_is_loaded_is_told_and_not_logged() -> None:
    told: list[tuple[str, str, int, int]] = []
    said: list[str] = []
    code = "print('loading reading 5 20'); print('loading reading more'); " + READY + "time.sleep(60)"

    async def main() -> None:
        argv = [sys.executable, "-c", code]
        child = await start("kid", argv, {}, lambda _, line: said.append(line), lambda *count: told.append(count))
        await child.ready
        await stop([child], 10)

    asyncio.run(main())
    assert told == [("kid", "reading", 5, 20)]
    assert said == ["loading reading more"]


# What `up` passes on


def test_json_of_a_child_is_passed_on_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "stderr", Console(stderr=True))
    monkeypatch.setattr(relay, "stderr", console.stderr)
    console.speak_json("up")
    relay.pass_on("draft-1", '{"level": "warning", "service": "draft", "message": "wet", "count": 3}')
    relay.pass_on("draft-1", "W0000 of a library")
    relay.pass_on("draft-1", "")
    relay.pass_on("draft-1", "[1]")
    console.complain("two\nlines")
    console.stderr.print("by the way")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == {"level": "warning", "service": "draft-1", "message": "wet", "count": 3}
    assert [(line["service"], line["level"], line["message"]) for line in lines[1:]] == [
        ("draft-1", "info", "W0000 of a library"),
        ("draft-1", "info", "[1]"),
        ("up", "error", "two\nlines"),
        ("up", "info", "by the way"),
    ]


def test_lines_of_children_are_coloured_by_name_and_severity(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(relay, "stderr", Console(file=written, force_terminal=True, color_system="standard"))
    relay.pass_on("draft-1", "ERROR: [bold]out of luck[/]")
    relay.pass_on("target", "fine: all of it")
    assert written.getvalue() == (
        "\x1b[35m     draft-1 │ \x1b[0m\x1b[31mERROR: [bold]out of luck[/]\x1b[0m\n"
        "\x1b[34m      target │ \x1b[0mfine: all of it\n"
    )
