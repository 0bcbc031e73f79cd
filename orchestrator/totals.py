"""How the server as a whole is doing, as a line of the log every so often while it is busy, in the words of vLLM's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from orchestrator.core.requests import Request
from orchestrator.metrics import Load
from orchestrator.outputs import Event, Finished, Piece
from pilotfish.errors import PilotfishError
from pilotfish.logs import fields

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
_RECENT_PROMPTS = 1000
"""Prompts that the hit rate of the prefix cache is of, as with vLLM."""


@dataclass(slots=True)
class Drafted:
    """What became of the draft tokens of one drafter."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round with a draft, the target's own one among them."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class Totals:
    """Counts what is served, and tells it.

    Args:
        load: how things stand now.
        now: seconds.
    """

    def __init__(self, load: Callable[[], Load], now: Callable[[], float] = time.perf_counter) -> None:
        self._load, self._now = load, now
        self._since = now()
        self._prompt_tokens = self._generation_tokens = 0
        self._drafters: dict[str, Drafted] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_PROMPTS)  # tokens of prompts, and cached ones

    def watch(self) -> Watch:
        """For the events of one ask."""
        return Watch(self)

    async def tell(self) -> None:
        """Tells for ever, every ``INTERVAL_S`` seconds in which there was something to do."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.tell_once()

    def tell_once(self) -> None:
        """The line of the time since the last one; none if nothing was to be done."""
        load, now = self._load(), self._now()
        seconds = max(now - self._since, 1e-9)
        if self._prompt_tokens or self._generation_tokens or load.running or load.waiting:
            self._write(load, seconds)
        self._since = now
        self._prompt_tokens = self._generation_tokens = 0
        self._drafters = {}

    def add_prompt(self, request: Request) -> None:
        """Counts a prompt that was read."""
        self._prompt_tokens += len(request.prompt)
        self._recent.append((len(request.prompt), request.cached_tokens or 0))

    def add_piece(self, piece: Piece) -> None:
        """Counts what a round added to a sample."""
        self._generation_tokens += len(piece.token_ids)
        if piece.drafted:
            drafter = self._drafters.setdefault(piece.drafter, Drafted())
            drafter.drafts += 1
            drafter.drafted += piece.drafted
            drafter.accepted += piece.accepted

    def _write(self, load: Load, seconds: float) -> None:
        prompt, generation = self._prompt_tokens / seconds, self._generation_tokens / seconds
        read = sum(tokens for tokens, _ in self._recent)
        hit_rate = sum(cached for _, cached in self._recent) / read if read else 0.0
        told = (
            f"Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generation:.1f} tokens/s, "
            f"Running: {load.running} reqs, Waiting: {load.waiting} reqs, KV cache usage: {load.kv_usage:.1%}, "
            f"Prefix cache hit rate: {hit_rate:.1%}"
        )
        told += "".join(
            f"; {name}: Mean acceptance length: {each.acceptance_length:.2f}, Draft acceptance rate: "
            f"{each.acceptance_rate:.1%}, Accepted: {each.accepted} tokens, Drafted: {each.drafted} tokens"
            for name, each in self._drafters.items()
        )
        values = fields(
            event="totals",
            seconds=round(seconds, 3),
            prompt_tokens_per_s=round(prompt, 2),
            generation_tokens_per_s=round(generation, 2),
            running=load.running,
            waiting=load.waiting,
            kv_cache_usage=round(load.kv_usage, 4),
            prefix_cache_hit_rate=round(hit_rate, 4),
            drafters={
                name: asdict(each)
                | {
                    "acceptance_rate": round(each.acceptance_rate, 4),
                    "acceptance_length": round(each.acceptance_length, 3),
                }
                for name, each in self._drafters.items()
            },
        )
        log.info("%s", told, extra=values)


class Watch:
    """Counts the events of one ask.

    Args:
        totals: where to.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._unread: dict[int, Request] = {}  # by index of the sample

    def began(self, requests: Sequence[Request]) -> None:
        """It was taken."""
        self._unread = dict(enumerate(requests))

    def saw(self, event: Event | PilotfishError) -> None:
        """Counts an event as it is made."""
        if isinstance(event, Piece | Finished) and (request := self._unread.pop(event.index, None)) is not None:
            self._totals.add_prompt(request)
        if isinstance(event, Piece):
            self._totals.add_piece(event)

    def closed(self) -> None:
        """Nobody waits any more for what has not ended."""
