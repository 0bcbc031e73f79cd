"""Asks the deployment, so many requests at once, and audits every answer. All IO of the checks is here."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from pilotfish.check.audit import audit
from pilotfish.check.setting import Setting
from pilotfish.client.aio import AsyncClient
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Capabilities, Completion, ServerInfo
from pilotfish.errors import PilotfishError

Question = tuple[str | Sequence[int], SamplingParams]
"""A prompt and what is asked of it."""


Value = TypeVar("Value")


class Progress(Protocol):
    """Told how far the asking is."""

    def begin(self, what: str, count: int) -> None:
        """So many requests come next."""

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
    """

    def __init__(
        self,
        client: AsyncClient,
        info: ServerInfo,
        capabilities: Capabilities,
        setting: Setting,
        progress: Progress,
    ) -> None:
        self._client, self._progress = client, progress
        self._gate = asyncio.Semaphore(setting.concurrency)
        self.info, self.capabilities, self.setting = info, capabilities, setting
        self.requests = 0
        self.tokens = 0
        self.faults: Counter[str] = Counter()
        """What ``audit`` found, and how often."""

    def lacks(self, *fields: str) -> str | None:
        """Why the deployment does not honour one of these fields; None if it honours them all."""
        known = {field.name: field for field in self.capabilities.fields}
        for name in fields:
            if name not in known:
                return f"the server does not know the field {name}"
            if not known[name].honoured:
                return f"{name} is not honoured: {known[name].reason}"
        return None

    def some(self, count: int, of_quick: int) -> int:
        """How many: ``of_quick`` in a quick run, else ``count``."""
        return of_quick if self.setting.is_quick else count

    def seed(self, *what: object) -> int:
        """A seed for a request, the same for the same words and the same run. 64 bits."""
        words = "/".join(map(str, (self.setting.seed, *what)))
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")

    async def ask(self, what: str, questions: Sequence[Question]) -> list[Completion]:
        """All of them at once, as far as the limit lets them; answers in the same order.

        Raises:
            PilotfishError: one of them failed; the others are cancelled.
        """
        self._progress.begin(what, len(questions))
        return await self._together([self._ask(*question) for question in questions])

    async def ask_in_turn(self, what: str, questions: Sequence[Question]) -> list[Completion]:
        """One after the other."""
        self._progress.begin(what, len(questions))
        return [await self._ask(*question) for question in questions]

    async def leave(self, what: str, visits: Sequence[tuple[str, SamplingParams, int]]) -> None:
        """Opens all streams at once and closes each after so many tokens; with 0 before it was heard of.

        A stream that ends before that is left then.

        Args:
            visits: prompt, what is asked of it, and how many tokens to wait for.
        """
        self._progress.begin(what, len(visits))
        await self._together([self._visit(*visit) for visit in visits])

    async def _visit(self, prompt: str, params: SamplingParams, stay: int) -> None:
        seen = 0
        async with self._gate, self._client.stream(prompt, params, timeout=self.setting.timeout_s) as stream:
            while seen < stay and (piece := await anext(stream, None)) is not None:
                seen += len(piece.tokens)
        self.requests += 1
        self._progress.advance()

    async def _ask(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        async with self._gate:
            completion = await self._client.generate(prompt, params, timeout=self.setting.timeout_s)
        self.requests += 1
        self.tokens += len(completion.token_ids)
        self.faults.update(audit(params, completion, self.info))
        self._progress.advance()
        return completion

    async def _together(self, asked: Sequence[Coroutine[Any, Any, Value]]) -> list[Value]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in asked]
        except* PilotfishError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]
