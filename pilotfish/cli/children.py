"""Child processes of one command: started, watched until ready, stopped in order. Knows nothing about models."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from pilotfish.errors import PilotfishError

_READY = re.compile(r"ready \S+ (\S+:\d+)((?: \w+=\S+)*)")
_LOADING = re.compile(r"loading (\w+) (\d+) (\d+)")
_LAST_LINES = 15
_LAST_WORDS_S = 1.0
_PR_SET_PDEATHSIG = 1

Log = Callable[[str, str], None]
"""Called with (name of the child, one line of its output)."""
Progress = Callable[[str, str, int, int], None]
"""Called with (name of the child, what it does with its weights, bytes done, bytes in all)."""


class ChildDiedError(PilotfishError):
    """A child process ended that should not have; the message carries its last lines."""


class Child:
    """One running process that says ``ready NAME HOST:PORT`` on stdout once it serves, and maybe more.

    Before, it may say ``loading WHAT DONE TOTAL``, in bytes.

    What it says before that is logged when it is ready or asked to end. If it dies instead, its death tells the last
    of it, and only what came before is logged.

    Attributes:
        name: in logs.
        ready: result is the address that it serves at; fails with ChildDiedError if it ends before.
        also: what else it says with it, as ``key=value``.
        ended: done when the process has ended and its output is read.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        stdout: _Output,
        stderr: _Output,
        log: Log,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._progress = progress
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._held: list[str] | None = []  # None once lines are logged as they come
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.also: dict[str, str] = {}
        self.ended = asyncio.create_task(self._watch(stdout, stderr), name=f"watch {name}")

    def death(self) -> ChildDiedError:
        """The error to report once it has ended, with its last lines."""
        code = self._process.returncode
        how = "was killed by " + signal.Signals(-code).name if code is not None and code < 0 else f"exited with {code}"
        said = "; its last lines:" + "".join(f"\n  {line}" for line in self._last) if self._last else " without a word"
        return ChildDiedError(f"{self.name} {how}{said}")

    def terminate(self) -> None:
        """Asks it to end, if it still runs."""
        if self._process.returncode is None:
            self._log_held()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends it at once, with whatever it has started itself."""
        if self._process.returncode is None:
            self._kill_group()

    async def _watch(self, stdout: _Output, stderr: _Output) -> None:
        readers = [asyncio.create_task(self._read_stdout(stdout)), asyncio.create_task(self._read_stderr(stderr))]
        await self._process.wait()
        self._kill_group()  # what it has started itself would live on, and hold the pipes open
        _, unfinished = await asyncio.wait(readers, timeout=_LAST_WORDS_S)
        for task in unfinished:
            task.cancel()
        stdout.close()
        stderr.close()
        if not self.ready.done():
            if self._held is not None:
                self._held = self._held[:-_LAST_LINES]
            self._log_held()
            self.ready.set_exception(self.death())
            self.ready.exception()  # marks it as seen: not every caller waits for it

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_stdout(self, output: _Output) -> None:
        async for line in output.lines():
            if (match := _READY.fullmatch(line)) and not self.ready.done():
                self.also = dict(pair.split("=", 1) for pair in match[2].split())
                self.ready.set_result(match[1])
                self._log_held()
            elif self._progress is not None and (match := _LOADING.fullmatch(line)):
                self._progress(self.name, match[1], int(match[2]), int(match[3]))
            else:
                self._show(line)

    async def _read_stderr(self, output: _Output) -> None:
        async for line in output.lines():
            self._show(line)

    def _show(self, line: str) -> None:
        self._last.append(line)
        if self._held is None:
            self._log(self.name, line)
        else:
            self._held.append(line)

    def _log_held(self) -> None:
        for line in self._held or ():
            self._log(self.name, line)
        self._held = None


async def start(
    name: str, argv: Sequence[str], env: Mapping[str, str], log: Log, progress: Progress | None = None
) -> Child:
    """Starts one process.

    It does not get the terminal's Ctrl-C, so that children stop in the order that their parent wants; and it is
    killed with its parent where the system can do that (Linux).
    """
    stdout, stdout_end = await _Output.open()
    stderr, stderr_end = await _Output.open()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout_end,
            stderr=stderr_end,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except BaseException:
        stdout.close()
        stderr.close()
        raise
    finally:
        os.close(stdout_end)
        os.close(stderr_end)
    return Child(name, process, stdout, stderr, log, progress)


async def stop(children: Sequence[Child], grace_s: float) -> None:
    """Ends the children one after the other with SIGTERM, each once the one before has ended.

    Those that are left when ``grace_s`` seconds are over are killed.
    """
    deadline = asyncio.get_running_loop().time() + grace_s
    try:
        async with asyncio.timeout_at(deadline):
            for child in children:
                child.terminate()
                await asyncio.shield(child.ended)
    except TimeoutError:
        pass
    finally:
        for child in children:
            child.kill()
        await asyncio.gather(*(child.ended for child in children))


class _Output:
    """The reading end of a pipe that a child writes to.

    Not asyncio's own: its ``Process.wait`` returns only once nobody holds the pipes any more, grandchildren included.
    """

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader = reader
        self._transport = transport

    @classmethod
    async def open(cls) -> tuple[_Output, int]:
        """The reading end, and the file descriptor of the writing end."""
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        return cls(reader, transport), writing

    def close(self) -> None:
        self._transport.close()

    async def lines(self) -> AsyncIterator[str]:
        """Lines as a terminal would show them: of a progress bar that rewrites its line, the last state."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while chunk := await self._reader.read(1 << 16):
            *whole, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in whole:
                yield _last_state(line)
        if rest := rest + decoder.decode(b"", final=True):
            yield _last_state(rest)


def _last_state(line: str) -> str:
    return line.rstrip().rpartition("\r")[2]


def die_with_parent() -> Callable[[], None] | None:
    """A ``preexec_fn`` that has the kernel kill the child when this process dies, however it dies; None off Linux."""
    return partial(_die_with, os.getpid()) if sys.platform == "linux" else None


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died already, before the request
        os._exit(1)
