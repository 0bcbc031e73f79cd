"""One request's way out: tokens to text, stop texts, usage, and a queue that its client drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason
from orchestrator.core.requests import Request, TokenLogprobs
from orchestrator.core.rounds import Judged, Run
from orchestrator.detokenizer import Detokenizer
from orchestrator.leaving import Leaving
from orchestrator.usage import RoundTimes, Usage, UsageMeter
from pilotfish.errors import PilotfishError


class Prompt(NamedTuple):
    """The prompt, for those who asked for it; fields as in generation.proto, parallel.

    Attributes:
        logprobs: of its tokens from the second on, if they were asked for.
    """

    token_texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added to one sample; fields as in generation.proto, the lists parallel.

    Attributes:
        accepted: draft tokens of the round that were kept; with stop texts the tokens may come in a later piece.
        logprobs: of its tokens, if they were asked for.
        judged: the round's proposal, if there was one and it was asked for.
        drafter: name of the model that proposed.
    """

    token_texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    drafted: int
    accepted: int
    times: RoundTimes
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    judged: Judged | None = None
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sample that did not fail."""

    reason: FinishReason
    usage: Usage
    index: int = 0


Event = Prompt | Piece | Finished


class Watcher(Protocol):
    """Follows the events of an ask."""

    def began(self, requests: Sequence[Request]) -> None:
        """It was taken, as these requests, one for each sample."""

    def saw(self, event: Event | PilotfishError) -> None:
        """An event has come."""

    def closed(self) -> None:
        """Nobody takes any more of them."""


class Events:
    """The events of all samples of one ask, in the order in which they came.

    Args:
        watchers: are told of them.
        begin_with_prompt: nothing but an error goes before the prompt.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), begin_with_prompt: bool = False) -> None:
        self._watchers = watchers
        self._queue: asyncio.Queue[Event | PilotfishError] = asyncio.Queue()
        self._held: list[Event] | None = [] if begin_with_prompt else None  # until the prompt has come

    def put(self, event: Event | PilotfishError) -> None:
        """Adds an event, or the error that ended a sample."""
        for watcher in self._watchers:
            watcher.saw(event)
        if self._held is None:
            self._queue.put_nowait(event)
        elif isinstance(event, Piece | Finished):
            self._held.append(event)
        else:
            for each in (event, *self._held):
                self._queue.put_nowait(each)
            self._held = None

    def close(self) -> None:
        """Nobody takes any more of them."""
        for watcher in self._watchers:
            watcher.closed()

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
        includes_stop: what ends the completion is part of its text.
        prompt: to be sent before the first piece, with its log probabilities.
        named: names of tokens without text that stop texts name; see ``Leaving``.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        events: Events,
        index: int = 0,
        min_tokens: int = 0,
        includes_stop: bool = False,
        prompt: Prompt | None = None,
        named: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._leaving = Leaving(detokenizer, stops, min_tokens, named, includes_stop)
        self._events, self._index, self._prompt = events, index, prompt
        self._meter = UsageMeter(time.perf_counter())

    def scheduled(self) -> None:
        """The request is in a batch for the first time, or again."""
        if self._meter.scheduled_at is None:
            self._meter.scheduled_at = time.perf_counter()

    def push(self, run: Run, times: RoundTimes) -> bool:
        """Takes what a round added; returns whether the request has ended with it."""
        if self._prompt is not None:
            self._events.put(self._prompt._replace(logprobs=tuple(run.request.prompt_logprobs)))
            self._prompt = None
        if run.token_ids:
            self._events.put(self._piece(run, times))
        reason = FinishReason.STOP if self._leaving.is_stopped else run.reason
        if reason is None:
            return False
        self._events.put(Finished(reason, self._meter.usage(run.request, time.perf_counter()), self._index))
        return True

    def _piece(self, run: Run, times: RoundTimes) -> Piece:
        left, taken = self._leaving.take(run)
        drafted = self._meter.add(run, taken, times, time.perf_counter())
        self._meter.completion_tokens -= self._leaving.dropped
        return Piece(
            token_texts=left.texts,
            token_ids=left.token_ids,
            kinds=left.kinds,
            drafted=drafted,
            accepted=run.kinds[:taken].count(TokenKind.ACCEPTED),
            times=times,
            index=self._index,
            judged=run.judged and run.judged._replace(path=run.judged.path[:taken]),
            logprobs=left.logprobs,
            drafter=run.drafter,
        )

    def fail(self, error: PilotfishError) -> None:
        """Ends the request with an error."""
        self._events.put(error)
