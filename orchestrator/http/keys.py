"""API keys: who may ask. Kept as hashes, compared in constant time, never logged."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.http.errors import ApiError
from pilotfish.errors import InvalidArgumentError

CLIENT = "pilotfish.client"
"""Where the scope of a call says whose key it has: a hash."""

OPEN_PATHS = frozenset({"/", "/health"})
"""Served without a key: a load balancer has none, and the playground asks for it."""


def read_keys(given: Iterable[str], file: Path | None) -> list[str]:
    """The keys given and those of a file, one a line; empty lines and those that start with # are skipped.

    Raises:
        InvalidArgumentError: a key is no printable ASCII without spaces and commas, the file cannot be read or has no
            key. Keys are never part of a message.
    """
    keys = list(given)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"api_key_file is {file}, which cannot be read: {error}", "api_key_file"
            ) from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InvalidArgumentError(f"api_key_file is {file}, which has no key; write one a line", "api_key_file")
        keys += found
    for index, key in enumerate(keys):
        if not key or not key.isascii() or not key.isprintable() or " " in key or "," in key:
            message = f"API key {index} must be ASCII without spaces and commas, and not empty"
            raise InvalidArgumentError(message, "api_key")
    return keys


class Keys:
    """ASGI middleware that lets only those pass who have one of the keys.

    Args:
        app: the next.
        keys: any of them will do.
        open_paths: served without one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app, self._open_paths = app, open_paths
        self._hashes = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, or answers 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            found = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            if scheme.lower() != "bearer" or not self._is_known(found):
                await _refusal(bool(key)).response()(scope, receive, send)
                return
            scope[CLIENT] = found
        await self._app(scope, receive, send)

    def _is_known(self, found: bytes) -> bool:
        """Takes as long whichever key is compared, and however much of it is right."""
        return sum(hmac.compare_digest(found, known) for known in self._hashes) > 0


def _refusal(has_key: bool) -> ApiError:
    message = "the API key is not one of this server's" if has_key else "this server wants an API key"
    return ApiError(
        401,
        f"{message}; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
