"""Every field of every message that a worker takes, at and beyond its limits, while another stream goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from limit_cases import cases
from rows import Row, Shape, greedy_rows, ints, shaping_rows, token_rows

from pilotfish.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PilotfishError,
)
from pilotfish.rpc import codec, status
from pilotfish.steps import (
    DraftStep,
    Grammar,
    GrammarKind,
    ProposalKind,
    SamplingRows,
    Supports,
    TargetStep,
    WantedLogprobs,
)
from pilotfish.v1 import draft_pb2, target_pb2, target_pb2_grpc, types_pb2

GRAMMAR = Grammar(GrammarKind.REGEX, "[ab]*", (1,))


def sampling() -> SamplingRows:
    shaping = shaping_rows(Shape(0, biases={5: 1.0}, allowed=(5, 6), min_tokens=2, ends=(1,)), Shape(1))
    return replace(greedy_rows(2), shaping=replace(shaping, grammars=(GRAMMAR,), grammar_indices=ints(-1, 0)))


def target_step(pages: list[int]) -> TargetStep:
    return TargetStep(
        step_id=1,
        rows=token_rows(
            Row([5, 6, 7], 0, pages[:1], [-1, 0, 0]), Row([8], 0, pages[1:2]), copies=[(slot(pages), slot(pages))]
        ),
        sampling=sampling(),
        output_nodes=ints(0, 3),
        draw_rules=np.array([2, 1], np.uint8),
        supports=Supports(ints(2, 0), ints(5, 9)),
        feature_rules=np.array([1, 2], np.uint8),
        logprobs=WantedLogprobs(ints(2, -1), ints(1), ints(9), ints(3)),
    )


def draft_step(pages: list[int]) -> DraftStep:
    return DraftStep(
        step_id=1,
        rows=token_rows(Row([5, 6], 0, pages[:1]), Row([8], 0, pages[1:2]), copies=[(slot(pages), slot(pages))]),
        sampling=sampling(),
        draft_lengths=ints(2, 0),
        proposal_kinds=np.array([ProposalKind.GREEDY, ProposalKind.GREEDY], np.uint8),
        support_limit=8,
        node_limits=ints(2, 0),
    )


def slot(pages: list[int]) -> int:
    return pages[2] * 16


def pages_of(opened: Any) -> list[int]:
    """Three pages of what was granted."""
    grant = opened[0] if isinstance(opened, tuple) else opened
    return [grant.first_page + index for index in range(3)]


@asynccontextmanager
async def undisturbed(worker: Any, step: Callable[[list[int]], Any]) -> Any:
    """Another stream that takes the same step over and over, and gets the same answer."""
    stream = worker.stream()
    own, done, count = step(pages_of(await stream.open(8))), asyncio.Event(), 0

    async def go_on() -> None:
        nonlocal count
        wanted = (await stream.run(own)).token_ids
        while not done.is_set():
            count += 1
            assert np.array_equal((await stream.run(own)).token_ids, wanted)
            await asyncio.sleep(0.001)

    going = asyncio.create_task(go_on())
    yield
    done.set()
    await going
    assert count > 1
    await stream.close()


async def try_each(found: Iterator[tuple[str, Any]], ask: Callable[[Any], Awaitable[None]]) -> int:
    """Each is answered, or refused with the field at fault; the number that were refused."""
    refused, unnamed = 0, []
    for what, message in found:
        try:
            await ask(message)
        except (NotFoundError, FailedPreconditionError):
            refused += 1
        except PilotfishError as error:
            refused += 1
            if not isinstance(error, InvalidArgumentError | OverloadedError) or not error.field:
                unnamed.append(f"{what}: {type(error).__name__}: {error}")
    assert not unnamed, "\n".join(unnamed)
    return refused


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_whatever_a_step_or_an_opening_has_is_answered_or_refused_by_name(
    kind: str, start_target: Any, start_draft: Any
) -> None:
    request, make, to_pb = {
        "target": (target_pb2.ExecuteTargetRequest, target_step, codec.target_step_to_pb),
        "draft": (draft_pb2.ExecuteDraftRequest, draft_step, codec.draft_step_to_pb),
    }[kind]

    async def scenario() -> tuple[int, int]:
        start = start_target(features="final") if kind == "target" else start_draft()
        async with start as worker, undisturbed(worker, make):

            async def open_with(message: Any) -> None:
                stream = worker.stream()
                await stream.call.write(request(open=message))
                await answer(stream)
                await stream.close()

            async def run_with(message: Any) -> None:
                await stream.call.write(request(step=message))
                await answer(stream)

            openings = await try_each(cases(types_pb2.StreamOpen(page_count=8, peer="test")), open_with)
            stream = worker.stream()
            sound = to_pb(make(pages_of(await stream.open(8))))
            await run_with(sound)
            if kind == "draft":  # one that takes no features; so it says, and goes on
                sound.features.CopyFrom(types_pb2.Tensor(dtype=1, shape=[1, 1], data=bytes(4)))
            steps = await try_each(cases(sound), run_with)
            await stream.close()
            return openings, steps

    openings, steps = asyncio.run(scenario())
    assert openings >= 3
    assert steps > 100


async def answer(stream: Any) -> None:
    try:
        response = await stream.call.read()
    except grpc.aio.AioRpcError as error:
        raise status.from_grpc(error, "worker") from None
    assert response is not grpc.aio.EOF  # type: ignore[attr-defined]
    if response.WhichOneof("payload") == "refused":  # its message is that of the error
        raise InvalidArgumentError(response.refused.message, response.refused.message.partition(" is ")[0])


def test_whatever_is_read_or_compiled_is_answered_or_refused_by_name(start_target: Any) -> None:
    async def scenario() -> int:
        async with start_target(features="final") as worker, undisturbed(worker, target_step):
            stream, stub = worker.stream(), target_pb2_grpc.TargetServiceStub(worker.channel)
            grant = await stream.open(8)

            async def read(message: Any) -> None:
                try:
                    async for _ in stub.ReadFeatures(message):
                        pass
                except grpc.aio.AioRpcError as error:
                    raise status.from_grpc(error, "worker") from None

            async def compile_it(message: Any) -> None:
                try:
                    await stub.CompileGrammar(message)
                except grpc.aio.AioRpcError as error:
                    raise status.from_grpc(error, "worker") from None

            slots = codec.pack(ints(grant.first_page * 16), "<i4")
            reading = target_pb2.ReadFeaturesRequest(incarnation=grant.incarnation, slots=slots)
            grammar = codec.grammar_to_pb(GRAMMAR)
            refused = await try_each(cases(reading), read)
            refused += await try_each(cases(target_pb2.CompileGrammarRequest(grammar=grammar)), compile_it)
            await stream.close()
            return refused

    assert asyncio.run(scenario()) > 15
