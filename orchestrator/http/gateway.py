"""Runs the HTTP server in the orchestrator's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from orchestrator.generation import Generation
from orchestrator.http.app import make_app
from orchestrator.http.keys import read_keys
from orchestrator.http.settings import HttpSettings
from pilotfish.errors import InvalidArgumentError

GRACE_S = 5
"""How long answers that are under way are given at the end."""
_BACKLOG = 2048


class Gateway:
    """An HTTP server. Takes its port at once, so that one that is taken is told early; answers from ``start`` on.

    Args:
        settings: with an address.

    Attributes:
        address: ``host:port`` with the port really taken.

    Raises:
        InvalidArgumentError: the address is none, or cannot be had; or the keys cannot be read.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._keys = read_keys((key.get_secret_value() for key in settings.api_key), settings.api_key_file)
        self._socket = _bind(settings.http)
        host = settings.http.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, generation: Generation) -> None:
        """Starts to answer."""
        settings = self._settings
        limits = settings.http_max_body_bytes, settings.http_max_requests
        app = make_app(generation, self._keys, *limits, settings.http_playground)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        """Takes no more calls, gives running ones a while, and frees the port."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._socket.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the orchestrator's."""
        yield


def _bind(listen: str) -> socket.socket:
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgumentError(f"http is {listen!r}; it must be HOST:PORT, such as 127.0.0.1:8000", "http")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(_BACKLOG)
            taken.setblocking(False)
        except BaseException:
            taken.close()
            raise
    except OSError as error:
        raise InvalidArgumentError(
            f"http is {listen!r}, which cannot be bound ({error.strerror}); choose another, or port 0 for any free one",
            "http",
        ) from error
    return taken
