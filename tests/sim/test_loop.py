"""The loop over streams without IO: workers that answer at once, or never."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from fakes import STATES, FakeHead, FakeTarget, grant, plain_text

from orchestrator import workers
from orchestrator.core.requests import Params, Request
from orchestrator.core.rounds import Run
from orchestrator.core.scheduler import Limits, Scheduler
from orchestrator.loop import Loop
from orchestrator.workers import Backoff, Reply
from pilotfish.errors import DeadlineExceededError, PilotfishError, UnavailableError
from pilotfish.steps import Ints


class Stream:
    """What the loop needs of a ``WorkerStream``, over a fake worker."""

    def __init__(self, address: str, fake: Any) -> None:
        self.address, self.fake, self.grant = address, fake, fake.grant
        self.capabilities = getattr(fake, "capabilities", None)
        self.steps: list[Any] = []
        self.owed: list[tuple[int, asyncio.Future[Reply[Any]]]] = []  # steps that are never answered
        self.hangs = self.is_closed = False
        self.failed_step: int | None = None
        self.was_stopped = False
        self.on_answer = None

    @property
    def next_due(self) -> int | None:
        return self.owed[0][0] if self.owed else None

    @property
    def is_late(self) -> bool:
        return bool(self.owed) and self.owed[0][1].done()

    async def submit(self, step: Any, timeout_s: float | None = None) -> asyncio.Future[Reply[Any]]:
        reply: asyncio.Future[Reply[Any]] = asyncio.get_running_loop().create_future()
        self.steps.append(step)
        if self.hangs:
            self.owed.append((step.step_id, reply))
            if timeout_s is not None:
                asyncio.get_running_loop().call_later(timeout_s, self.fail, DeadlineExceededError("no answer"))
        else:
            reply.set_result(Reply(self.fake.run(step), time.perf_counter()))
        return reply

    def fail(self, error: PilotfishError) -> None:
        for _, reply in self.owed:
            if not reply.done():
                reply.set_exception(error)

    def close(self, reason: PilotfishError | None = None, at: int | None = None) -> None:
        self.is_closed, self.failed_step = True, at

    async def wait_closed(self) -> None:
        pass


class Served:
    """A loop with a target, heads, and one request that drafts one token at a time; the test plays its rounds."""

    def __init__(self, *heads: str, prompt_length: int = 10) -> None:
        self.loop = Loop(Scheduler(Limits(early_drafts=True)), self._read, 0.01, 60.0, step_timeout_s=0.05)
        self.open_target()
        self.heads = {name: self.open_head(name) for name in heads}
        self.reads, self.reads_fail = 0, False
        prompt = np.arange(prompt_length, dtype=np.int32)
        self.request = Request("r", prompt, Params(max_tokens=40, draft_length=1))
        self.text: list[int] = []
        self.expected = plain_text(prompt.tolist(), 40)
        self.loop.submit(self.request, self)  # type: ignore[arg-type]

    def open_target(self) -> None:
        self.target = FakeTarget(grant(64, features=STATES))
        self.stream = self._open(self.loop.target_opened, Stream("target", self.target))

    def open_head(self, name: str) -> Stream:
        return self._open(self.loop.draft_opened, Stream(name, FakeHead(grant(64, features=STATES), agreement=0.6)))

    @staticmethod
    def _open(opened: Any, stream: Stream) -> Stream:
        opened(stream)
        return stream

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            await self.loop._round()
            while self.loop._runs:
                self.loop._emit(*self.loop._runs.popleft())
            await asyncio.sleep(0)  # what is read in the background has its turn

    async def finish(self) -> None:
        while self.loop.scheduler.has_work:
            await self.rounds(1)

    async def _read(self, given: Any, slots: Ints) -> Any:
        self.reads += 1
        if self.reads_fail:
            raise UnavailableError("not today")
        return self.target.read_features(slots)

    # As an ``Output``

    def scheduled(self) -> None:
        pass

    def push(self, run: Run, times: object) -> bool:
        self.text += run.token_ids
        return False


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_a_replica_that_hangs_is_given_no_early_step() -> None:
    """It would cost its rows a second deadline."""

    async def scene() -> None:
        served = Served("d0", "d1")
        await served.rounds(5)
        at = served.request.draft
        assert at is not None
        assert served.loop._early
        hung, other = served.heads[at.replica], served.heads["d1" if at.replica == "d0" else "d0"]
        hung.hangs = True
        await served.rounds(1)
        sent = len(hung.steps)  # the last of them for the round to come, which waits for it
        await served.finish()
        assert len(hung.steps) == sent
        assert other.steps
        assert served.text == served.expected

    play(scene())


def test_what_an_old_stream_still_owes_does_not_end_the_new_one() -> None:
    """A request ends on a step that was sent early; until the next one its replica is opened anew."""

    async def scene() -> None:
        served = Served("d0")
        await served.rounds(5)
        served.heads["d0"].hangs = True
        await served.rounds(1)
        assert served.loop._early
        served.heads["d0"].fail(gone := UnavailableError("the worker closed the stream"))
        served.loop.draft_lost(served.heads["d0"], gone)  # type: ignore[arg-type]
        stream = served.open_head("d0")
        await served.finish()
        assert not stream.is_closed
        assert stream.steps
        assert served.text == served.expected

    play(scene())


def test_a_read_that_fails_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new target is asked at once."""
    monkeypatch.setattr(workers, "RETRY_S", (3600.0, 3600.0))

    async def scene() -> None:
        served = Served("d0", prompt_length=45)
        served.reads_fail = True
        await served.rounds(12)
        assert served.reads == 1
        served.loop.target_lost(served.stream, UnavailableError("the worker closed the stream"))  # type: ignore[arg-type]
        served.open_target()
        served.reads_fail = False
        await served.finish()
        assert served.reads > 1
        assert served.heads["d0"].steps[-1].draft_lengths.any()
        assert served.text == served.expected

    play(scene())


def test_a_read_is_tried_again_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RETRY_S", (0.0, 0.0))

    async def scene() -> None:
        served = Served("d0", prompt_length=45)
        served.reads_fail = True
        await served.rounds(12)
        assert served.reads > 3
        assert not served.heads["d0"].steps
        served.reads_fail = False
        await served.finish()
        assert served.heads["d0"].steps[-1].draft_lengths.any()
        assert served.text == served.expected

    play(scene())


def test_a_target_that_does_not_end_a_step_is_given_up() -> None:
    async def scene() -> None:
        served = Served("d0")
        await served.rounds(5)
        hung = served.stream
        hung.hangs = True
        await served.rounds(1)
        assert hung.is_closed
        served.loop.target_lost(hung, UnavailableError("the stream was closed"))  # type: ignore[arg-type]
        served.open_target()
        await served.finish()
        assert served.text == served.expected

    play(scene())


def test_waits_double_up_to_a_limit_until_something_succeeds() -> None:
    backoff = Backoff()
    assert [backoff.failed() for _ in range(7)] == [0.1, 0.2, 0.4, 0.5, 0.5, 0.5, 0.5]
    backoff.succeeded()
    assert backoff.failed() == 0.1
