"""A peer as a process that is asked in lines of JSON, and the turns in which several are asked."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Any

from peer_results import Answer, Row, Turn

PAUSE_S = 0.3  # between turns; threads that spin for a while after their work have gone to sleep by then
TIMEOUT_S = 600.0  # vLLM compiles for more than a minute before it is ready


class PeerError(Exception):
    """A peer that cannot be measured; the message says why."""


class Peer:
    """A running peer; a context manager that ends it.

    Args:
        row: what to start.
        log: file that gets what it says on stderr.

    Raises:
        PeerError: it does not start.
    """

    def __init__(self, row: Row, log: Path) -> None:
        self.row = row
        self._log = log
        try:
            self._process = self._open(row.command, log)
        except OSError as error:
            raise PeerError(f"{row.name} did not start: {error}") from error
        try:
            self.version: str = self._read()["version"]
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C is this process's; the peer ends with its stdin
            )

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Turn:
        """Asks all prompts at once.

        Raises:
            PeerError: it failed, or answered with more or fewer than ``max_tokens`` tokens.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        answers = [Answer(tuple(each["token_ids"]), tuple(each["times"])) for each in self._read()["answers"]]
        if wrong := [len(answer.token_ids) for answer in answers if len(answer.token_ids) != max_tokens]:
            raise PeerError(f"{self.row.name} answered with {wrong[0]} tokens; {max_tokens} were asked for")
        return Turn(tuple(answers))

    def close(self) -> None:
        """Ends it, by force where it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # of a question that it did not live to read
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        """The next reply. There is one for each question, so that none waits in the file's buffer unseen."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            raise PeerError(f"{self.row.name} has said nothing for {TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.row.name} did not start: {reply['error']}")
        return reply

    def _death(self) -> PeerError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return PeerError(f"{self.row.name} has died; its last lines:" + "".join(f"\n  {line}" for line in lines))

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def in_turns(peers: Sequence[Peer], batch: int, repeat: int) -> list[Peer]:
    """Who can answer so many prompts at once, forwards and backwards in turn: nobody always follows the same one."""
    able = [peer for peer in peers if peer.row.max_batch is None or batch <= peer.row.max_batch]
    return able if repeat % 2 == 0 else able[::-1]


def measure(
    peers: Sequence[Peer], prompts: Sequence[Sequence[int]], batches: Sequence[int], repeats: int, tokens: int
) -> Iterator[tuple[Peer, int, Turn | PeerError]]:
    """Asks every peer in turn. Every repeat has prompts of its own while there are some, so that caches do not help.

    Yields:
        (peer, prompts at once, what came of it); a peer that failed is not asked again.
    """
    supply, alive = cycle(prompts), list(peers)
    for repeat in range(repeats):
        for batch in batches:
            question = list(islice(supply, batch))
            for peer in in_turns(alive, batch, repeat):
                time.sleep(PAUSE_S)
                try:
                    yield peer, batch, peer.ask(question, tokens)
                except PeerError as error:
                    alive.remove(peer)
                    yield peer, batch, error
