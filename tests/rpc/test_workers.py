"""Worker streams against a scripted target: fencing, answers that cannot be read, opening again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeTarget, grant

from orchestrator.core.requests import Params, Request
from orchestrator.core.scheduler import Limits, Scheduler
from orchestrator.workers import TARGET, FeatureReader, WorkerLink, WorkerStream
from pilotfish.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, UnavailableError
from pilotfish.rpc import codec, status
from pilotfish.rpc.channel import connect
from pilotfish.rpc.server import Server
from pilotfish.steps import TargetStep
from pilotfish.v1 import target_pb2, target_pb2_grpc

Answer = Callable[[TargetStep, FakeTarget], AsyncIterator[target_pb2.TargetResult]]


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Answers each step with whatever ``answer`` yields, and ends the stream when it raises StopAsyncIteration.

    Features are read in the chunks of ``chunks``, or fail with what it is.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.opened = 0
        self.peers: set[str] = set()
        self.chunks: list[np.ndarray] | Exception = []

    async def Execute(self, requests: Any, context: Any) -> AsyncIterator[target_pb2.ExecuteTargetResponse]:
        self.opened += 1
        self.peers.add(context.peer())
        fake = FakeTarget(replace(grant(32), incarnation=self.opened))
        async for request in requests:
            if request.HasField("open"):
                yield target_pb2.ExecuteTargetResponse(opened=codec.grant_to_pb(fake.grant))
                continue
            async for result in self._answer(codec.target_step_from_pb(request.step), fake):
                yield target_pb2.ExecuteTargetResponse(result=result)

    @status.streaming
    async def ReadFeatures(self, request: Any, context: Any) -> AsyncIterator[target_pb2.ReadFeaturesResponse]:
        self.peers.add(context.peer())
        assert (request.incarnation, list(np.frombuffer(request.slots, "<i4"))) == (7, [5, 9, 2])
        if isinstance(self.chunks, Exception):
            raise self.chunks
        for chunk in self.chunks:
            yield target_pb2.ReadFeaturesResponse(features=codec.tensor_to_pb(chunk))


def step(step_id: int) -> TargetStep:
    """Some sound step."""
    scheduler = Scheduler(Limits())
    scheduler.target_opened(grant(32))
    scheduler.submit(Request("r", np.array([1, 2, 3], np.int32), Params(max_tokens=4)))
    batch = scheduler.seal(scheduler.plan_target(()), {})
    assert batch is not None
    return replace(batch.step, step_id=step_id)


async def right(step: TargetStep, fake: FakeTarget) -> AsyncIterator[target_pb2.TargetResult]:
    yield codec.target_result_to_pb(fake.run(step))


def play(answer: Answer, scene: Callable[[str, ScriptedTarget], Awaitable[None]]) -> None:
    async def run() -> None:
        servicer = ScriptedTarget(answer)
        add = target_pb2_grpc.add_TargetServiceServicer_to_server
        server = Server("127.0.0.1:0", "pilotfish.v1.TargetService")
        server.add(lambda to: add(servicer, to))
        await server.start()
        try:
            await scene(server.address, servicer)
        finally:
            await server.stop(0)

    asyncio.run(run())


def test_a_stale_answer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def stale_first(step: TargetStep, fake: FakeTarget) -> AsyncIterator[target_pb2.TargetResult]:
        result = codec.target_result_to_pb(fake.run(step))
        stale = target_pb2.TargetResult()
        stale.CopyFrom(result)
        stale.step_id = step.step_id - 1
        yield stale
        yield result

    async def scene(address: str, _: ScriptedTarget) -> None:
        async with connect(address) as channel:
            stream = await WorkerStream.open(TARGET, address, channel)
            for step_id in (7, 8):
                reply = await (await stream.submit(step(step_id)))
                assert reply.result.step_id == step_id
            stream.close()

    play(stale_first, scene)
    assert "dropped a stale answer to step 6" in caplog.text


def test_an_answer_that_cannot_be_read_ends_the_stream() -> None:
    async def torn(step: TargetStep, fake: FakeTarget) -> AsyncIterator[target_pb2.TargetResult]:
        yield target_pb2.TargetResult(step_id=step.step_id, token_ids=b"\0\0\0")

    async def scene(address: str, _: ScriptedTarget) -> None:
        async with connect(address) as channel:
            stream = await WorkerStream.open(TARGET, address, channel)
            with pytest.raises(InvalidArgumentError, match="token_ids is 3 bytes"):
                await (await stream.submit(step(1)))
            assert isinstance(await stream.wait_closed(), InvalidArgumentError)
            with pytest.raises(InvalidArgumentError):  # and later steps fail the same way
                await (await stream.submit(step(2)))

    play(torn, scene)


def test_a_deadline_leaves_the_answer_owed() -> None:
    async def slow(step: TargetStep, fake: FakeTarget) -> AsyncIterator[target_pb2.TargetResult]:
        await asyncio.sleep(0.2)
        yield codec.target_result_to_pb(fake.run(step))

    async def scene(address: str, _: ScriptedTarget) -> None:
        async with connect(address) as channel:
            stream = await WorkerStream.open(TARGET, address, channel)
            with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.01 s"):
                await (await stream.submit(step(1), timeout_s=0.01))
            assert stream.is_late
            reply = await (await stream.submit(step(2)))  # comes after the one that is owed
            assert reply.result.step_id == 2
            assert not stream.is_late
            stream.close()

    play(slow, scene)


def test_a_link_opens_again_under_a_new_incarnation() -> None:
    async def hang_up(step: TargetStep, fake: FakeTarget) -> AsyncIterator[target_pb2.TargetResult]:
        raise ConnectionError("hangs up")
        yield

    async def scene(address: str, _: ScriptedTarget) -> None:
        streams: asyncio.Queue[WorkerStream[Any, Any]] = asyncio.Queue()
        lost: list[WorkerStream[Any, Any]] = []
        link = WorkerLink(TARGET, address, streams.put_nowait, lambda stream, reason: lost.append(stream))
        await link.wait_opened(10)
        first = await streams.get()
        with pytest.raises(Exception, match="hangs up"):
            await (await first.submit(step(1)))
        second = await asyncio.wait_for(streams.get(), 10)
        assert lost == [first]
        assert first.failed_step == 1
        assert (first.grant.incarnation, second.grant.incarnation) == (1, 2)
        await link.close()

    play(hang_up, scene)


def test_a_link_says_who_does_not_answer() -> None:
    async def scene() -> None:
        link = WorkerLink(TARGET, "127.0.0.1:1", lambda stream: None, lambda address, reason: None)
        with pytest.raises(UnavailableError, match=r"no target answers at 127\.0\.0\.1:1 after 0\.2 s"):
            await link.wait_opened(0.2)
        await link.close()

    asyncio.run(scene())


def test_steps_in_flight_are_answered_in_order() -> None:
    async def scene(address: str, _: ScriptedTarget) -> None:
        async with connect(address) as channel:
            stream = await WorkerStream.open(TARGET, address, channel)
            futures = [await stream.submit(step(step_id)) for step_id in range(1, 6)]
            assert [(await future).result.step_id for future in futures] == [1, 2, 3, 4, 5]
            stream.close()

    play(right, scene)


READ = replace(grant(32, features=("final",)), incarnation=7), np.array([5, 9, 2], np.int32)


def test_features_come_on_a_connection_of_their_own() -> None:
    async def scene(address: str, servicer: ScriptedTarget) -> None:
        values = np.arange(12, dtype=np.uint16).reshape(3, 4)
        servicer.chunks = [values[:2], values[2:]]
        reader = FeatureReader(address)
        async with connect(address) as channel:
            stream = await WorkerStream.open(TARGET, address, channel)
            read = await reader.read(*READ)
            assert read.dtype == np.uint16
            assert np.array_equal(read, values)
            await reader.read(*READ)
            assert len(servicer.peers) == 2
            stream.close()
        await reader.close()

    play(right, scene)


def test_a_read_that_fails_says_why() -> None:
    async def scene(address: str, servicer: ScriptedTarget) -> None:
        reader = FeatureReader(address)
        servicer.chunks = NotFoundError("incarnation 0x7 is not open here")
        with pytest.raises(NotFoundError, match="0x7 is not open here"):
            await reader.read(*READ)
        servicer.chunks = [np.zeros(3, np.float32)]
        with pytest.raises(InvalidArgumentError, match=r"features is \(3,\); a chunk has two axes"):
            await reader.read(*READ)
        servicer.chunks = [np.zeros((1, 4), np.float32), np.zeros((2, 3), np.float32)]
        with pytest.raises(InvalidArgumentError, match=r"features is \(2, 3\); a chunk has 4 values a slot"):
            await reader.read(*READ)
        await reader.close()
        nobody = FeatureReader("127.0.0.1:1")
        with pytest.raises(UnavailableError):
            await nobody.read(*READ)
        await nobody.close()

    play(right, scene)
