"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import grpc

from pilotfish.client.failures import cancelled, failure
from pilotfish.client.results import (
    Capabilities,
    Completion,
    Fold,
    Piece,
    ServerInfo,
    capabilities_from_pb,
    server_info_from_pb,
)
from pilotfish.client.surface import Surface
from pilotfish.rpc.channel import connect
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import GenerationServiceStub

Value = TypeVar("Value")


class AsyncStream(AsyncIterator[Piece]):
    """The pieces of one request, in order; closing it early cancels the request.

    async with client.stream("Once upon a time") as stream:
        async for piece in stream:
            print(piece.text, end="")
    print(stream.result.usage)
    """

    def __init__(self, call: Any, address: str, timeout_s: float | None) -> None:
        self._call = call
        self._address = address
        self._timeout_s = timeout_s
        self._fold = Fold()
        self._closed = False

    async def __anext__(self) -> Piece:
        """The next piece; raises what :mod:`pilotfish.errors` has if the request fails."""
        while not self._closed:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                if not self._closed:
                    self._closed = True
                    raise failure(error, self._address, self._timeout_s) from error
            except asyncio.CancelledError as error:
                # grpc.aio raises this for a cancelled call too, whoever cancelled it; only the task's own may pass.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    self._call.cancel()
                    raise
                if not self._closed:
                    self._closed = True
                    raise cancelled(self._address) from error
            else:
                if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                    self._closed = True
                    self._fold.end()
                elif (piece := self._fold.add(response)) is not None:
                    return piece
        raise StopAsyncIteration

    @property
    def result(self) -> Completion:
        """The completion; FailedPreconditionError before the end and after an early close."""
        return self._fold.result

    async def close(self) -> None:
        """Cancels the request if it still runs; the server then releases all it holds."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


Later = Coroutine[Any, Any, Value]


class AsyncClient(Surface[AsyncStream, Later[Completion], Later[ServerInfo], Later[Capabilities]]):
    """Talks to an orchestrator from one event loop; any number of requests at once.

    async with AsyncClient("127.0.0.1:50050") as client:
        completions = await asyncio.gather(*(client.generate(prompt) for prompt in prompts))
    """

    def __init__(self, address: str = "127.0.0.1:50050") -> None:
        super().__init__(address)
        self._channel: grpc.aio.Channel | None = None

    def _stub(self) -> GenerationServiceStub:
        # A channel belongs to the loop that runs when it is made, so it waits for the first call.
        if self._channel is None:
            self._channel = connect(self.address)
        return GenerationServiceStub(self._channel)

    async def _info(self, timeout_s: float | None) -> ServerInfo:
        try:
            return server_info_from_pb(await self._stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise failure(error, self.address, timeout_s) from error

    async def _capabilities(self, timeout_s: float | None) -> Capabilities:
        try:
            request = pb.GetCapabilitiesRequest()
            return capabilities_from_pb(await self._stub().GetCapabilities(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise failure(error, self.address, timeout_s) from error

    async def _complete(self, request: pb.GenerateRequest, timeout_s: float | None) -> Completion:
        async with self._open(request, timeout_s) as stream:
            async for _ in stream:
                pass
            return stream.result

    def _open(self, request: pb.GenerateRequest, timeout_s: float | None) -> AsyncStream:
        return AsyncStream(self._stub().Generate(request, timeout=timeout_s), self.address, timeout_s)

    async def close(self) -> None:
        """Closes the connection; running requests are cancelled."""
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
