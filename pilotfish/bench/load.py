"""The load generator: asks a list of prompts, so many at a time or at given moments, and writes down what came when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np

from pilotfish.bench.prompts import Prompt
from pilotfish.bench.records import Load, Pass, Record
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion
from pilotfish.client.surface import ChatMessages
from pilotfish.errors import PilotfishError


def poisson(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """The first ``count`` moments of a Poisson process, in seconds, counted from the first."""
    gaps = rng.exponential(1 / rate, count)
    return list(np.cumsum(gaps) - gaps[0])


class Arrived(Protocol):
    """A part of an answer."""

    @property
    def tokens(self) -> Sized:
        """That it brought; final once the answer is over."""


class Stream(Protocol):
    """An answer as it comes; raises ``PilotfishError`` if it fails."""

    def __aiter__(self) -> AsyncIterator[Arrived]: ...

    @property
    def result(self) -> Completion:
        """The whole of it, at its end."""


class Client(Protocol):
    """What the load generator needs of a client; ``AsyncClient`` is one, ``OpenAIClient`` another."""

    def chat_stream(
        self, messages: ChatMessages, params: SamplingParams, *, timeout: float | None
    ) -> AbstractAsyncContextManager[Stream]: ...

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout: float | None
    ) -> AbstractAsyncContextManager[Stream]: ...


class LoadGenerator:
    """Asks one server.

    Args:
        client: of the server.
        timeout_s: of each request; None waits for ever.
        on_done: called when a request has ended.
    """

    def __init__(self, client: Client, timeout_s: float | None, on_done: Callable[[], None]) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._on_done = on_done

    async def run(
        self, prompts: Sequence[Prompt], params: SamplingParams, load: Load, rng: np.random.Generator
    ) -> Pass:
        """Asks every prompt once. A request that fails is recorded as such, and the others go on.

        Args:
            rng: draws the arrivals of an open loop.
        """
        cpu, began = time.process_time(), time.perf_counter()
        if load.rate is not None:
            due = poisson(load.rate, len(prompts), rng)
            asking = [self._ask(prompt, params, began, at) for prompt, at in zip(prompts, due, strict=True)]
            records = await asyncio.gather(*asking)
        else:
            records = await self._closed(prompts, params, load.concurrency or 1, began)
        return Pass(tuple(records), time.perf_counter() - began, time.process_time() - cpu)

    async def _closed(
        self, prompts: Sequence[Prompt], params: SamplingParams, concurrency: int, began: float
    ) -> list[Record]:
        records: dict[int, Record] = {}
        waiting = iter(enumerate(prompts))  # shared: who is free takes the next

        async def user() -> None:
            for index, prompt in waiting:
                records[index] = await self._ask(prompt, params, began)

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return [records[index] for index in range(len(prompts))]

    async def _ask(self, prompt: Prompt, params: SamplingParams, began: float, due: float | None = None) -> Record:
        if due is not None:
            await asyncio.sleep(began + due - time.perf_counter())
        sent = due if due is not None else time.perf_counter() - began
        arrived: list[tuple[float, Arrived]] = []
        completion, failure = None, None
        try:
            async with self._open(prompt, params) as stream:
                async for piece in stream:
                    arrived.append((time.perf_counter() - began, piece))
                completion = stream.result
        except PilotfishError as error:
            failure = str(error)
        ended = time.perf_counter() - began
        self._on_done()
        return Record(sent, tuple((at, len(piece.tokens)) for at, piece in arrived), ended, completion, failure)

    def _open(self, prompt: Prompt, params: SamplingParams) -> AbstractAsyncContextManager[Stream]:
        if isinstance(prompt.content, str):
            messages = [{"role": "user", "content": prompt.content}]
            return self._client.chat_stream(messages, params, timeout=self._timeout_s)
        return self._client.stream(prompt.content, params, timeout=self._timeout_s)
