"""One request's way out: tokens to text, stop texts, usage, and a queue that its client drains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason, StopScanner
from orchestrator.core.rounds import Run
from orchestrator.tokenizer import Detokenizer
from orchestrator.usage import RoundTimes, Usage, UsageMeter
from pilotfish.errors import PilotfishError


class Prompt(NamedTuple):
    """The prompt, for those who asked for it; fields as in generation.proto, parallel."""

    token_texts: tuple[str, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added to one sample; fields as in generation.proto, the lists parallel."""

    token_texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    drafted: int
    times: RoundTimes
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sample that did not fail."""

    reason: FinishReason
    usage: Usage
    index: int = 0


Event = Prompt | Piece | Finished


class Watcher(Protocol):
    """Follows the events of an ask."""

    def saw(self, event: Event | PilotfishError) -> None:
        """An event has come."""

    def closed(self) -> None:
        """Nobody takes any more of them."""


class Events:
    """The events of all samples of one ask, in the order in which they came.

    Args:
        watcher: is told of them.
    """

    def __init__(self, watcher: Watcher | None = None) -> None:
        self._watcher = watcher
        self._queue: asyncio.Queue[Event | PilotfishError] = asyncio.Queue()

    def put(self, event: Event | PilotfishError) -> None:
        """Adds an event, or the error that ended a sample."""
        if self._watcher is not None:
            self._watcher.saw(event)
        self._queue.put_nowait(event)

    def close(self) -> None:
        """Nobody takes any more of them."""
        if self._watcher is not None:
            self._watcher.closed()

    async def get(self) -> Event:
        """The next event.

        Raises:
            PilotfishError: a sample failed.
        """
        event = await self._queue.get()
        if isinstance(event, PilotfishError):
            raise event
        return event


class Output:
    """Turns the runs of one sample into events.

    Args:
        detokenizer: fresh.
        stops: texts that end the completion.
        events: where they go.
        index: of the sample.
        min_tokens: tokens that the completion has before a stop text can end it.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], events: Events, index: int = 0, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._min_tokens, self._taken = min_tokens, 0
        self._scanner = StopScanner(stops)
        self._events, self._index = events, index
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
        self._events.put(Piece(tuple(texts), run.token_ids[:kept], run.kinds[:kept], drafted, times, self._index))
        reason = FinishReason.STOP if stopped else run.reason
        if reason is None:
            return False
        self._events.put(Finished(reason, self._meter.usage(run.request, time.perf_counter()), self._index))
        return True

    def fail(self, error: PilotfishError) -> None:
        """Ends the request with an error."""
        self._events.put(error)

    def _texts(self, run: Run) -> tuple[list[str], bool]:
        """Text that became final with each token, up to the one that completes a stop text."""
        texts = []
        ends_on_token = len(run.token_ids) if run.reason is FinishReason.STOP else 0
        for index, token_id in enumerate(run.token_ids, start=1):
            text = "" if index == ends_on_token else self._detokenizer.push(token_id)
            self._taken += 1
            texts.append(self._scanner.push(text, may_stop=self._taken > self._min_tokens))
            if self._scanner.is_stopped:
                return texts, True
        if run.reason is not None:
            texts[-1] += self._scanner.push(self._detokenizer.finish(), may_stop=self._taken > self._min_tokens)
            if self._scanner.is_stopped:
                return texts, True
            texts[-1] += self._scanner.flush()
        return texts, False
