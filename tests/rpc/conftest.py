"""Real worker services in this process, on a port of their own, and a bare client for their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tiny_models import make_tiny_llama

from draft_svc import server as draft_server
from pilotfish.errors import InvalidArgumentError
from pilotfish.rpc import codec, status
from pilotfish.rpc.channel import connect
from pilotfish.rpc.server import Server
from pilotfish.rpc.steps_service import ModelThread
from pilotfish.steps import Capabilities, DraftResult, DraftStep, Grant, TargetResult, TargetStep
from pilotfish.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from target_svc import server as target_server


async def write(call: Any, message: Any) -> None:
    """Sends a message; where the stream has ended meanwhile, the next read says why."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)


async def read_field(call: Any, field: str) -> Any:
    """The next message's payload; the stream's own error if it has ended, ``InvalidArgumentError`` for a refusal."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise status.from_grpc(error, "worker") from None
    assert response is not grpc.aio.EOF, "the stream ended without an error"  # type: ignore[attr-defined]
    if response.WhichOneof("payload") == "refused":
        raise InvalidArgumentError(response.refused.message)
    assert response.WhichOneof("payload") == field
    return getattr(response, field)


class TargetStream:
    """One Execute stream of a target."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = target_pb2_grpc.TargetServiceStub(channel).Execute()

    async def open(self, pages: int | None = None) -> Grant:
        opening = types_pb2.StreamOpen(page_count=pages, peer="test")
        await write(self.call, target_pb2.ExecuteTargetRequest(open=opening))
        return codec.grant_from_pb(await self._read("opened"))

    async def send(self, step: TargetStep) -> None:
        await write(self.call, target_pb2.ExecuteTargetRequest(step=codec.target_step_to_pb(step)))

    async def receive(self) -> TargetResult:
        return codec.target_result_from_pb(await self._read("result"))

    async def run(self, step: TargetStep) -> TargetResult:
        await self.send(step)
        return await self.receive()

    async def close(self) -> None:
        await self.call.done_writing()
        assert await self.call.code() is grpc.StatusCode.OK

    async def _read(self, field: str) -> Any:
        return await read_field(self.call, field)


class DraftStream:
    """One Execute stream of a draft replica."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = draft_pb2_grpc.DraftServiceStub(channel).Execute()

    async def open(self, pages: int | None = None) -> tuple[Grant, Capabilities]:
        opening = types_pb2.StreamOpen(page_count=pages, peer="test")
        await write(self.call, draft_pb2.ExecuteDraftRequest(open=opening))
        return codec.draft_opened_from_pb(await read_field(self.call, "opened"))

    async def run(self, step: DraftStep) -> DraftResult:
        await write(self.call, draft_pb2.ExecuteDraftRequest(step=codec.draft_step_to_pb(step)))
        return codec.draft_result_from_pb(await read_field(self.call, "result"))

    async def close(self) -> None:
        await self.call.done_writing()
        assert await self.call.code() is grpc.StatusCode.OK


class Worker:
    """A running service, and a channel to it."""

    def __init__(self, address: str, streams: Any, thread: ModelThread, channel: grpc.aio.Channel, stream: Any) -> None:
        self.address, self.streams, self.thread, self.channel = address, streams, thread, channel
        self._stream = stream

    def stream(self) -> Any:
        """A new ``TargetStream`` or ``DraftStream``, not opened yet."""
        return self._stream(self.channel)


StartWorker = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-draft", seed=1, layers=1)


@pytest.fixture
def start_target(tiny_folder: Path) -> StartWorker:
    def start(**settings: Any) -> AbstractAsyncContextManager[Worker]:
        defaults: dict[str, Any] = {
            "model": tiny_folder,
            "listen": "127.0.0.1:0",
            "pages": 32,
            "dtype": "float32",
            "device": "cpu",
        }
        config = target_server.TargetConfig(**(defaults | settings))
        return _serve(config, target_server.make_service, "pilotfish.v1.TargetService", TargetStream)

    return start


@pytest.fixture
def start_draft(tiny_draft_folder: Path) -> StartWorker:
    def start(**settings: Any) -> AbstractAsyncContextManager[Worker]:
        defaults: dict[str, Any] = {
            "model": tiny_draft_folder,
            "listen": "127.0.0.1:0",
            "pages": 32,
            "dtype": "float32",
            "device": "cpu",
        }
        config = draft_server.DraftConfig(**(defaults | settings))
        return _serve(config, draft_server.make_service, "pilotfish.v1.DraftService", DraftStream)

    return start


@asynccontextmanager
async def _serve(config: Any, make_service: Any, name: str, stream: Any) -> AsyncIterator[Worker]:
    thread = ModelThread()
    add, streams = make_service(config, thread)
    server = Server(config.listen, name)
    server.add(add)
    await server.start()
    await server.set_serving(True)
    try:
        async with connect(server.address) as channel:
            yield Worker(server.address, streams, thread, channel, stream)
    finally:
        await streams.stop()
        await server.stop(1.0)
        thread.shutdown()
