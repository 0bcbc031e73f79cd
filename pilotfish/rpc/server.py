"""Runs one gRPC server until it is told to stop: health, reflection, graceful end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pilotfish.addresses import read_address
from pilotfish.errors import InvalidArgumentError
from pilotfish.rpc.channel import MAX_MESSAGE_BYTES, OPTIONS

log = logging.getLogger(__name__)

AddServices = Callable[[grpc.aio.Server], None]


class Server:
    """A gRPC server with health and reflection.

    Takes its port at once, so that one that is taken already is told before a model is loaded, and
    answers from ``start`` on.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        service: full name, such as ``pilotfish.v1.TargetService``.
        max_request_bytes: larger messages are refused with RESOURCE_EXHAUSTED, before they are kept.

    Attributes:
        address: ``host:port`` with the port really taken.

    Raises:
        InvalidArgumentError: the address is none, or cannot be had.
    """

    def __init__(self, listen: str, service: str, max_request_bytes: int = MAX_MESSAGE_BYTES) -> None:
        own = {"grpc.max_receive_message_length": max_request_bytes, "grpc.so_reuseport": 0}
        self._server = grpc.aio.server(options=[*(dict(OPTIONS) | own).items()])
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._service = service
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = read_address(listen, "listen", to_listen=True)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"listen is {address!r}, which cannot be bound: the port is in use or the host is not of this machine; "
                "choose another, or port 0 for any free one",
                "listen",
            ) from error
        host = address.rpartition(":")[0]
        self.address = f"{host}:{port}"

    def add(self, add: AddServices) -> None:
        """Registers the servicer; before ``start``."""
        add(self._server)

    async def start(self) -> None:
        """Starts to answer, not yet healthy."""
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Reports health for the service and for the server as a whole."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service):
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Turns unhealthy, refuses new calls and gives running ones ``grace_s`` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve_until_signal(
    server: Server,
    name: str,
    before_stop: Callable[[], Awaitable[None]] | None = None,
    grace_s: float = 5.0,
    also: str = "",
) -> None:
    """Serves until SIGINT or SIGTERM; prints one line starting with ``ready`` when it answers.

    Args:
        server: not started yet.
        name: of the service, in the line.
        before_stop: runs after the signal and before calls are cut, such as to end streams.
        grace_s: seconds that running calls are given.
        also: what else to say of it in the line, as ``key=value``.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    await server.set_serving(True)
    print(f"ready {name} {server.address} {also}".rstrip(), flush=True)
    await stop.wait()
    log.info("%s stops", name)
    if before_stop is not None:
        await before_stop()
    await server.stop(grace_s)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service's main coroutine on uvloop, or on asyncio's loop where uvloop is not to be had."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
