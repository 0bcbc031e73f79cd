"""Limits on what clients may send: the size of a body, the time it takes, and how many ask at once."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.errors import RETRY_AFTER_S, ApiError

BODY_TIMEOUT_S = 30.0
"""How long a body may take to arrive."""


class _ClientLeftError(Exception):
    """The client closed the connection before its body was complete."""


class Limits:
    """ASGI middleware that reads bodies whole before anything else does.

    Args:
        app: the next; finds the body read already.
        max_body_bytes: larger ones are answered 413.
        max_requests: more with a body at the same time are answered 429.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_requests: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_requests = max_requests
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers with an error."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if self._running >= self._max_requests:
                raise _too_many(self._max_requests)
        except _ClientLeftError:
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, _Replay(body, receive), send)
        finally:
            self._running -= 1

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        headers = Headers(scope=scope)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A form could be sent by any web page that somebody on this network looks at.
            raise ApiError(
                415, f"Content-Type is {media_type!r}; it must be application/json", code="unsupported_media"
            )
        if int(headers.get("content-length", "0")) > self._max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._collect(receive)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", "timeout_error", code="timeout"
            ) from error

    async def _collect(self, receive: Receive) -> bytes:
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        # The rest is not read: the connection is of no more use.
        return ApiError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes, the most allowed here",
            code="request_too_large",
            headers={"Connection": "close"},
        )


class _Replay:
    """Gives a body that was read, and then what else the client does: leaving."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _too_many(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} requests are being answered, the most allowed here; try again later",
        "rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
