"""Limits on what clients may send: the size of a body, of all bodies at once, the time one takes, and how many ask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.errors import RETRY_AFTER_S, ApiError
from orchestrator.http.keys import CLIENT

BODY_TIMEOUT_S = 30.0
"""How long a body may take to arrive."""

FREE_BYTES = 64 << 10
"""Of each body, counted in no budget: what a connection may hold anyway, and more than most requests have. So they pass
however many large bodies are under way."""


_CLOSE = {"Connection": "close"}  # the rest of the body is not read, so that the connection is of no more use


class _ClientLeftError(Exception):
    """The client closed the connection before its body was complete."""


class Budget:
    """Bytes of bodies under way: from their arrival until their requests are answered, as these keep them.

    Args:
        total_bytes: of all.
        key_bytes: of those with the same API key.
    """

    def __init__(self, total_bytes: int, key_bytes: int) -> None:
        self._total_bytes, self._key_bytes = total_bytes, key_bytes
        self._held: Counter[bytes | None] = Counter()

    @contextmanager
    def account(self, key: bytes | None) -> Iterator[Account]:
        """For one body, of a client with that key or of one without; what it took is given back at the end."""
        account = Account(self, key)
        try:
            yield account
        finally:
            self._add(key, -account.held)

    def take(self, key: bytes | None, size: int) -> None:
        """Takes so many bytes.

        Raises:
            ApiError: 503 where all clients together would have too many under way, 429 where the key would.
        """
        if self._held.total() + size > self._total_bytes:
            raise _busy(503, f"bodies of {self._total_bytes} bytes are under way", "service_unavailable", **_CLOSE)
        if key is not None and self._held[key] + size > self._key_bytes:
            what = f"bodies of {self._key_bytes} bytes are under way with this API key"
            raise _busy(429, what, "rate_limit_exceeded", **_CLOSE)
        self._add(key, size)

    def _add(self, key: bytes | None, size: int) -> None:
        self._held[key] += size
        if not self._held[key]:
            del self._held[key]


class Account:
    """What one body has taken of a budget: ``held`` bytes."""

    def __init__(self, budget: Budget, key: bytes | None) -> None:
        self._budget, self._key = budget, key
        self.held = 0

    def grow(self, size: int) -> None:
        """The body has so many bytes now; see ``Budget.take``."""
        more = max(0, size - FREE_BYTES) - self.held
        if more > 0:
            self._budget.take(self._key, more)
            self.held += more


class Limits:
    """ASGI middleware that reads bodies whole before anything else does.

    Args:
        app: the next; finds the body read already.
        max_body_bytes: larger ones are answered 413.
        max_requests: more with a body at the same time are answered 429.
        budget: of all bodies under way.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_requests: int, budget: Budget) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_requests = max_requests
        self._budget = budget
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers with an error."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        with self._budget.account(scope.get(CLIENT)) as account:
            try:
                replay = _Replay(await self._read(scope, receive, account), receive)
                if self._running >= self._max_requests:
                    raise _busy(429, f"{self._max_requests} requests are being answered", "rate_limit_exceeded")
            except _ClientLeftError:
                return
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            self._running += 1
            try:
                await self._app(scope, replay, send)
            finally:
                self._running -= 1

    async def _read(self, scope: Scope, receive: Receive, account: Account) -> bytearray:
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
                return await self._collect(receive, account)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", "timeout_error", code="timeout"
            ) from error

    async def _collect(self, receive: Receive, account: Account) -> bytearray:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeftError
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            account.grow(len(body))
            more = message.get("more_body", False)
        return body

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes, the most allowed here",
            code="request_too_large",
            headers=_CLOSE,
        )


class _Replay:
    """Gives a body that was read, and then what else the client does: leaving."""

    def __init__(self, body: bytearray, receive: Receive) -> None:
        self._body: bytearray | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _busy(status: int, what: str, code: str, **headers: str) -> ApiError:
    kind = "rate_limit_error" if status == 429 else "service_unavailable_error"
    message = f"{what}, the most allowed here; try again later"
    return ApiError(status, message, kind, code=code, headers={"Retry-After": str(RETRY_AFTER_S), **headers})
