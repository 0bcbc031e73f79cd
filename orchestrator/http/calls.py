"""One HTTP call from its body to its answer, whatever the endpoint: requests begun, events collected or streamed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from orchestrator.generation import Answer, Ask, Generation
from orchestrator.http.errors import LOG, ApiError, api_error
from orchestrator.http.sse import EventStream, event, unless_gone
from orchestrator.outputs import Event
from orchestrator.request_log import RequestLog
from pilotfish.errors import PilotfishError

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it
NAMES = {"timeout_s": "timeout", "prompt token_ids": "prompt"}
"""What HTTP calls fields otherwise."""


class Writer(ABC):
    """Puts the events of a call into the shape of its endpoint.

    Attributes:
        id: of the answer.
        streams: whether the answer is a stream.
        names: what the endpoint calls fields otherwise; see ``api_error``.
    """

    id: str
    streams: bool
    names: dict[str, str] = NAMES

    @abstractmethod
    def begin(self) -> Iterator[bytes]:
        """The stream's first events."""

    @abstractmethod
    def push(self, prompt: int, event: Event) -> Iterator[bytes]:
        """The stream's events for what came of a sample of the prompt of that index."""

    @abstractmethod
    def end(self) -> Iterator[bytes]:
        """The stream's last events."""

    def failure(self, error: ApiError) -> bytes:
        """The stream's last event, for a call that fails on the way."""
        return event(error.body)

    @abstractmethod
    def add(self, prompt: int, event: Event) -> None:
        """Takes what came, for an answer in one piece."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""


async def respond(generation: Generation, asks: Sequence[Ask], writer: Writer, request: Request) -> Response:
    """Begins the requests and answers with what comes of them.

    All that is refused is refused before the answer begins. When the client leaves, its requests end.

    Raises:
        ApiError: a request is refused, or failed.
    """
    log: RequestLog = request.scope["state"][LOG]
    log.answer_id = writer.id
    async with AsyncExitStack() as resources:
        try:
            # One that waits for its grammar may be left, too.
            named = list(_named(asks, writer.id))
            answers = await unless_gone(request.receive, lambda: _begin(resources, generation, named, log))
            if writer.streams:
                return EventStream(_stream(answers, writer), resources.pop_all(), writer.names, writer.failure)
            await unless_gone(request.receive, lambda: _collect(answers, writer))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except PilotfishError as error:
            raise api_error(error, writer.names) from error
        return JSONResponse(writer.whole())


def _named(asks: Sequence[Ask], answer_id: str) -> Iterator[Ask]:
    """By the id of the answer, for errors and logs: several of one call each with a number."""
    for index, ask in enumerate(asks):
        yield replace(ask, request_id=answer_id if len(asks) == 1 else f"{answer_id}-{index}")


async def _begin(
    resources: AsyncExitStack, generation: Generation, asks: Sequence[Ask], log: RequestLog
) -> list[Answer]:
    return [await resources.enter_async_context(generation.begin(ask, log)) for ask in asks]


async def _stream(answers: Sequence[Answer], writer: Writer) -> AsyncGenerator[bytes, None]:
    has_begun = False
    async with aclosing(_events(answers)) as events:
        async for prompt, event in events:
            if not has_begun:  # only now: a request that fails before its first token is answered with a status
                has_begun = True
                for chunk in writer.begin():
                    yield chunk
            for chunk in writer.push(prompt, event):
                yield chunk
    for chunk in writer.end():
        yield chunk


async def _collect(answers: Sequence[Answer], writer: Writer) -> None:
    async with aclosing(_events(answers)) as events:
        async for prompt, event in events:
            writer.add(prompt, event)


async def _events(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all answers as they come, with the index of the answer."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    pending = {_next(answer): index for index, answer in enumerate(answers)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                if (found := task.result()) is not None:
                    pending[_next(answers[index])] = index
                    yield index, found
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _next(answer: Answer) -> asyncio.Task[Event | None]:
    async def ask() -> Event | None:
        return await anext(answer, None)

    return asyncio.create_task(ask(), name=f"next of {answer.request_id}")
