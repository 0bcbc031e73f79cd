"""One request's way out: tokens to text, stop texts, usage, and a queue that its client drains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason, StopScanner
from orchestrator.core.scheduler import Run
from orchestrator.tokenizer import Detokenizer
from orchestrator.usage import RoundTimes, Usage, UsageMeter
from pilotfish.errors import PilotfishError


class Piece(NamedTuple):
    """What one round added; fields as in generation.proto, the lists parallel."""

    token_texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    drafted: int
    times: RoundTimes


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request that did not fail."""

    reason: FinishReason
    usage: Usage


class Output:
    """Turns a request's runs into events.

    Args:
        detokenizer: fresh.
        stops: texts that end the completion.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._queue: asyncio.Queue[Piece | Finished | PilotfishError] = asyncio.Queue()
        self._meter = UsageMeter(time.perf_counter())

    def scheduled(self) -> None:
        """The request is in a batch for the first time, or again."""
        if self._meter.scheduled_at is None:
            self._meter.scheduled_at = time.perf_counter()

    def push(self, run: Run, times: RoundTimes) -> bool:
        """Takes what a round added; returns whether the request has ended with it."""
        texts, stopped = self._texts(run)
        kept = len(texts)
        drafted = self._meter.add(run, kept, times, time.perf_counter())
        self._queue.put_nowait(Piece(tuple(texts), run.token_ids[:kept], run.kinds[:kept], drafted, times))
        reason = FinishReason.STOP if stopped else run.reason
        if reason is None:
            return False
        self._queue.put_nowait(Finished(reason, self._meter.usage(run.request, time.perf_counter())))
        return True

    def fail(self, error: PilotfishError) -> None:
        """Ends the request with an error."""
        self._queue.put_nowait(error)

    async def next_event(self) -> Piece | Finished:
        """The next event; none follows ``Finished``.

        Raises:
            PilotfishError: the request failed.
        """
        event = await self._queue.get()
        if isinstance(event, PilotfishError):
            raise event
        return event

    def _texts(self, run: Run) -> tuple[list[str], bool]:
        """Text that became final with each token, up to the one that completes a stop text."""
        texts = []
        ends_on_token = len(run.token_ids) if run.reason is FinishReason.STOP else 0
        for index, token_id in enumerate(run.token_ids, start=1):
            text = "" if index == ends_on_token else self._detokenizer.push(token_id)
            texts.append(self._scanner.push(text))
            if self._scanner.is_stopped:
                return texts, True
        if run.reason is not None:
            texts[-1] += self._scanner.push(self._detokenizer.finish())
            if self._scanner.is_stopped:
                return texts, True
            texts[-1] += self._scanner.flush()
        return texts, False
