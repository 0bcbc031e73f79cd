"""Runs the HTTP server in the orchestrator's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from orchestrator.generation import Generation
from orchestrator.http.app import make_app
from orchestrator.http.keys import read_keys
from orchestrator.http.settings import HttpSettings
from pilotfish.addresses import bind
from pilotfish.steps import require

log = logging.getLogger(__name__)

GRACE_S = 5
"""How long answers that are under way are given at the end."""
_PORTS_TRIED = 100


class Gateway:
    """An HTTP server. Takes its port at once, so that one that is taken is told early; answers from ``start`` on.

    Args:
        settings: with an address.

    Attributes:
        address: ``host:port`` with the port really taken.

    Raises:
        InvalidArgumentError: the address cannot be had, the keys cannot be read, or a budget is below one body.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._keys = read_keys((key.get_secret_value() for key in settings.api_key), settings.api_key_file)
        budgets = ("http_body_budget_bytes", "http_body_budget_bytes_per_key")
        for name in budgets if self._keys else budgets[:1]:
            least, budget = settings.http_max_body_bytes, getattr(settings, name)
            require(budget >= least, name, budget, f"must be at least http_max_body_bytes, which is {least}")
        self._socket = bind(settings.http, "http", ports=_PORTS_TRIED if settings.http_next_port else 1)
        host = settings.http.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, generation: Generation) -> None:
        """Starts to answer."""
        config = uvicorn.Config(
            make_app(generation, self._keys, self._settings),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,  # its lines go where ours go, in the same form
            log_level=None if log.isEnabledFor(logging.DEBUG) else logging.WARNING,  # else what we say already
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
