"""Every field of every message that a worker takes, at and beyond its limits, while another stream goes on.

The fields are those of the protobuf descriptors: one that is added is tried too, and a kind of field or an array that
this file does not know fails it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rows import Row, Shape, greedy_rows, ints, shaping_rows, token_rows
from values import FLOATS, INTEGERS, MILLION

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

DTYPES = {
    "TokenRows": codec._ROWS | {"slot_copies": "<i4"},
    "SamplingRows": codec._SAMPLING,
    "ShapingRows": codec._SHAPING,
    "Supports": codec._SUPPORTS,
    "TargetStep": codec._TARGET_STEP,
    "WantedLogprobs": codec._WANTED_LOGPROBS,
    "DraftStep": codec._DRAFT_STEP,
    "Tensor": {"data": "u1"},
    "ReadFeaturesRequest": {"slots": "<i4"},
}
WHOLE = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


@dataclass(frozen=True)
class Case:
    """A message with one field changed."""

    name: str
    message: Any


def cases(message: Message) -> Iterator[Case]:
    """The message with every field of it, and of the messages in it, changed in turn."""

    def changed(path: tuple[str, ...], what: str, change: Callable[[Any, str], None]) -> Case | None:
        copy: Any = type(message)()
        copy.CopyFrom(message)
        parent = copy
        for name in path[:-1]:
            parent = getattr(parent, name)
            parent = parent[0] if not isinstance(parent, Message) else parent
        try:
            change(parent, path[-1])
        except ValueError:  # protobuf itself knows that it does not fit
            return None
        return Case(f"{'.'.join(path)} {what}", copy)

    for path, field, kind in fields_of(message):
        for what, change in changes(field, kind):
            if (case := changed(path, what, change)) is not None:
                yield case


def fields_of(message: Message, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldDescriptor, str]]:
    for field in message.DESCRIPTOR.fields:
        here = (*path, field.name)
        yield here, field, message.DESCRIPTOR.name
        if field.message_type is not None:
            inner = getattr(message, field.name)
            if field.is_repeated:
                assert len(inner), f"{here} needs an example"
                inner = inner[0]
            else:
                assert message.HasField(field.name), f"{here} needs an example"
            yield from fields_of(inner, here)


def changes(field: FieldDescriptor, message: str) -> Iterator[tuple[str, Callable[[Any, str], None]]]:
    if field.message_type is not None:
        if field.is_repeated:
            yield "repeated often", lambda parent, name: getattr(parent, name).extend([getattr(parent, name)[0]] * 9999)
        yield "cleared", lambda parent, name: parent.ClearField(name)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        dtype = np.dtype(DTYPES[message][field.name])
        yield "of an odd size", lambda parent, name: setattr(parent, name, getattr(parent, name) + b"x")
        yield "of a million", lambda parent, name: setattr(parent, name, bytes(MILLION * dtype.itemsize))
        yield "empty", lambda parent, name: setattr(parent, name, b"")
        for value in FLOATS if dtype.kind == "f" else INTEGERS:
            if dtype.kind == "f" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                yield f"with {value}", lambda parent, name, value=value: _set_first(parent, name, dtype, value)
    elif field.cpp_type in WHOLE or field.type == FieldDescriptor.TYPE_ENUM:
        for value in INTEGERS:
            if field.is_repeated:
                yield f"of {value}", lambda parent, name, value=value: getattr(parent, name).append(value)
            else:
                yield f"of {value}", lambda parent, name, value=value: setattr(parent, name, value)
        if field.is_repeated:
            yield "of a million", lambda parent, name: getattr(parent, name).extend([0] * MILLION)
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield "of a million", lambda parent, name: setattr(parent, name, "x" * MILLION)
    else:
        raise AssertionError(f"{field.full_name} is of a kind that this test does not know")


def _set_first(parent: Any, name: str, dtype: np.dtype[Any], value: float) -> None:
    array = np.frombuffer(getattr(parent, name), dtype).copy()
    array = array if len(array) else np.zeros(1, dtype)
    array[0] = value
    setattr(parent, name, array.tobytes())


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


@asynccontextmanager
async def undisturbed(worker: Any, step: Callable[[list[int]], Any]) -> Any:
    """Another stream that takes the same step over and over, and gets the same answer."""
    stream = worker.stream()
    opened = await stream.open(8)
    grant = opened[0] if isinstance(opened, tuple) else opened
    own, done, count = step([grant.first_page + i for i in range(3)]), asyncio.Event(), 0

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


async def try_each(found: Iterator[Case], ask: Callable[[Any], Awaitable[None]]) -> int:
    """Each is answered, or refused with the field at fault; the number that were refused."""
    refused, unnamed = 0, []
    for case in found:
        try:
            await ask(case.message)
        except (NotFoundError, FailedPreconditionError):
            refused += 1
        except PilotfishError as error:
            refused += 1
            if not isinstance(error, InvalidArgumentError | OverloadedError) or not error.field:
                unnamed.append(f"{case.name}: {type(error).__name__}: {error}")
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
                await answered(stream)
                await stream.close()

            async def run_with(message: Any) -> None:
                stream = worker.stream()
                await stream.open(8)
                await stream.call.write(request(step=message))
                await answered(stream)
                await stream.close()

            probe = worker.stream()
            opened = await probe.open(8)
            grant = opened[0] if isinstance(opened, tuple) else opened
            await probe.close()
            sound = to_pb(make([grant.first_page + i for i in range(3)]))
            if kind == "draft":  # this drafter takes none, and says so
                await run_with(sound)
                sound.features.CopyFrom(types_pb2.Tensor(dtype=1, shape=[1, 1], data=bytes(4)))
            else:
                await run_with(sound)
            opening = types_pb2.StreamOpen(page_count=8, peer="test")
            return await try_each(cases(opening), open_with), await try_each(cases(sound), run_with)

    openings, steps = asyncio.run(scenario())
    assert openings >= 3
    assert steps > 100


async def answered(stream: Any) -> None:
    try:
        response = await stream.call.read()
    except grpc.aio.AioRpcError as error:
        raise status.from_grpc(error, "worker") from None
    assert response is not grpc.aio.EOF  # type: ignore[attr-defined]


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
