"""Asks the deployment, so many requests at once, and audits every answer. All IO of the checks is here."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pilotfish.check.audit import audit
from pilotfish.check.own_law import TOP
from pilotfish.check.pace import Speed
from pilotfish.check.prompts import STORY
from pilotfish.check.setting import Setting
from pilotfish.client.aio import AsyncClient
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Capabilities, Completion, ServerInfo
from pilotfish.errors import PilotfishError

Question = tuple[str | Sequence[int], SamplingParams]
"""A prompt and what is asked of it."""


Value = TypeVar("Value")

_MEASURED = 16  # tokens of an answer by which the speed is measured
_ROWS = 32


class Progress(Protocol):
    """Told how far the asking is."""

    def begin(self, what: str, count: int, seconds: float) -> None:
        """So many requests come next, and probably take so long together."""

    def advance(self) -> None:
        """One of them has ended."""


class Asker:
    """Asks one server.

    Args:
        client: of the server.
        info: what the server says of itself.
        capabilities: what it says of fields.
        setting: of the run.
        progress: told of every request.
        laboratory: asks the two tiny models (``laboratory``); None where they do not run.

    Attributes:
        speed: of the server.
        scale: how much a check may ask; see ``some``.
        plenty: so many times as many samples are drawn, where they are cheap.
        growth: so much of what more time adds to that is drawn.
        requests, tokens: answers so far, and their tokens.
        seconds: that all this should have taken at that speed.
        faults: what ``audit`` found, and how often.
    """

    def __init__(
        self,
        client: AsyncClient,
        info: ServerInfo,
        capabilities: Capabilities,
        setting: Setting,
        progress: Progress,
        laboratory: Asker | None = None,
    ) -> None:
        self.client, self._progress = client, progress
        self._gate = asyncio.Semaphore(setting.concurrency)
        self.info, self.capabilities, self.setting = info, capabilities, setting
        self.laboratory = laboratory
        self.speed = Speed()
        self.scale = self.plenty = self.growth = 1.0
        self.requests = self.tokens = 0
        self.seconds = 0.0
        self.faults: Counter[str] = Counter()

    def lacks(self, *fields: str) -> str | None:
        """Why the deployment does not honour one of these fields; None if it honours them all."""
        known = {field.name: field for field in self.capabilities.fields}
        for name in fields:
            if name not in known:
                return f"the server does not know the field {name}"
            if not known[name].honoured:
                return f"{name} is not honoured: {known[name].reason}"
        return None

    def some(self, full: int, least: int) -> int:
        """How many, or how long: ``full`` in a run that asks everything, with less time less, down to ``least``."""
        return round(least + min(self.scale, 1.0) * (full - least))

    def samples(self, full: int, least: int) -> int:
        """How many draws from a law: as ``some``, and more than ``full`` where there is time."""
        return round(self.plenty * (least + self.growth * self.scale * (full - least)))

    def seed(self, *what: object) -> int:
        """A seed for a request, the same for the same words and the same run. 64 bits."""
        words = "/".join(map(str, (self.setting.seed, *what)))
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")

    async def ask(self, what: str, questions: Sequence[Question]) -> list[Completion]:
        """All of them at once, as far as the limit lets them; answers in the same order.

        Raises:
            PilotfishError: one of them failed; the others are cancelled.
        """
        self._begin(what, [params.max_tokens for _, params in questions], self.setting.concurrency)
        return await self._together([self._ask(*question) for question in questions])

    async def ask_in_turn(self, what: str, questions: Sequence[Question]) -> list[Completion]:
        """One after the other."""
        self._begin(what, [params.max_tokens for _, params in questions], at_once=1)
        return [await self._ask(*question) for question in questions]

    async def leave(self, what: str, visits: Sequence[tuple[str, SamplingParams, int]]) -> None:
        """Opens all streams at once and closes each after so many tokens; with 0 before it was heard of.

        A stream that ends before that is left then.

        Args:
            visits: prompt, what is asked of it, and how many tokens to wait for.
        """
        self._begin(what, [stay for _, _, stay in visits], self.setting.concurrency)
        await self._together([self._visit(*visit) for visit in visits])

    async def measure(self) -> None:
        """Finds out how fast the server is, alone and with many requests at once, drawn and told as most are."""
        has_laws = self.lacks("logprobs") is None
        alone = SamplingParams(max_tokens=_MEASURED, ignore_eos=True, draft_length=0)
        drawn = replace(
            alone, temperature=1.0, draft_length=None, acceptance="ratio", logprobs=TOP if has_laws else None
        )
        rows = min(self.setting.concurrency, _ROWS)
        await self._timed([alone])  # the first pays for what is made once
        alone_s = await self._timed([alone])
        together_s = await self._timed([drawn] * rows)
        self.speed = Speed.measured(alone_s / _MEASURED, together_s / _MEASURED, rows)

    async def _timed(self, asked: Sequence[SamplingParams]) -> float:
        started = time.perf_counter()
        await self.ask("how fast the server is", [(STORY, params) for params in asked])
        return time.perf_counter() - started

    def _begin(self, what: str, lengths: Sequence[int], at_once: int) -> None:
        seconds = self.speed.seconds(lengths, at_once)
        self.seconds += seconds
        self._progress.begin(what, len(lengths), seconds)

    async def _visit(self, prompt: str, params: SamplingParams, stay: int) -> None:
        seen = 0
        async with self._gate, self.client.stream(prompt, params, timeout=self.setting.timeout_s) as stream:
            while seen < stay and (piece := await anext(stream, None)) is not None:
                seen += len(piece.tokens)
        self.requests += 1
        self._progress.advance()

    async def _ask(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        completion = await self._send(prompt, params)
        self.requests += 1
        self.tokens += len(completion.token_ids)
        self.faults.update(audit(params, completion, self.info))
        self._progress.advance()
        return completion

    async def _send(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        async with self._gate:
            return await self.client.generate(prompt, params, timeout=self.setting.timeout_s)

    async def _together(self, asked: Sequence[Coroutine[Any, Any, Value]]) -> list[Value]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in asked]
        except* PilotfishError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]
