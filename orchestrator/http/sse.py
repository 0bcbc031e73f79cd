"""Server-sent events: a stream that ends what it is fed from when it ends, or its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.http.errors import ApiError, api_error

DONE = b"data: [DONE]\n\n"

Value = TypeVar("Value")


def event(data: Any, name: str = "") -> bytes:
    """One event; ``name`` for those who tell events apart by it."""
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + line + b"\n\n"


class EventStream(Response):
    """A stream of events.

    An error before the first event is an answer with its own status. Later there can be none any more: then it is an
    event itself, and the last.

    Args:
        chunks: events, encoded.
        resources: what the stream holds; closed when it is over, whether it was read or not.
        names: as ``api_error`` takes them.
        failure: event that tells of an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        resources: AsyncExitStack,
        names: dict[str, str],
        failure: Callable[[ApiError], bytes],
    ) -> None:
        # A proxy that collects the answer would hold back every token.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._resources, self._names, self._failure = chunks, resources, names, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the end, an error or the client's leaving."""
        with suppress(ClientDisconnect):
            async with self._resources, aclosing(self._chunks):
                answer = await unless_gone(receive, lambda: self._stream(scope, send))
                await answer(scope, receive, send)

    async def _stream(self, scope: Scope, send: Send) -> ASGIApp:
        """Sends the events; returns what is left to answer."""
        has_begun = False
        try:
            async for chunk in self._chunks:
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            answer = api_error(error, self._names)
            if not has_begun:
                return answer.response()
            answer.note(scope)
            await send({"type": "http.response.body", "body": self._failure(answer), "more_body": True})
        return _end


async def _end(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[Value]]) -> Value:
    """What ``work`` returns; it is cancelled when the client leaves.

    Raises:
        ClientDisconnect: the client left.
    """
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
