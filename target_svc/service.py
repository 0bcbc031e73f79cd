"""TargetService on the wire: messages to steps and back, no decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pilotfish.rpc import codec, status
from pilotfish.rpc.channel import CHUNK_BYTES
from pilotfish.rpc.steps_service import ModelThread, StepEngine, StepStreams, Wire
from pilotfish.steps import Grammar, Grant, Ints, TargetResult, TargetStep
from pilotfish.v1 import target_pb2, target_pb2_grpc, types_pb2

NAME = "pilotfish.v1.TargetService"


class Engine(StepEngine[TargetStep, TargetResult], Protocol):
    """What runs behind the service; see ``TargetEngine``. Features are read on another thread than the model's, and
    grammars compiled in other processes."""

    def features_per_chunk(self, chunk_bytes: int) -> int: ...
    def read_features(self, incarnation: int, slots: Ints) -> npt.NDArray[np.generic]: ...
    def compile_grammar(self, grammar: Grammar) -> Future[None]: ...


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves one engine on one model thread."""

    def __init__(self, engine: Engine, thread: ModelThread) -> None:
        self._engine = engine
        wire = Wire[TargetStep, TargetResult](codec.target_step_from_pb, _opened, _result, _refused)
        self.streams = StepStreams(engine, thread, wire)

    @status.unary
    async def Execute(self, request_iterator: Any, context: status.Context) -> None:
        await self.streams.serve(context)

    @status.streaming
    async def ReadFeatures(
        self, request: target_pb2.ReadFeaturesRequest, context: status.Context
    ) -> AsyncIterator[target_pb2.ReadFeaturesResponse]:
        slots = codec.unpack(request.slots, "<i4", "slots")
        chunk = self._engine.features_per_chunk(CHUNK_BYTES)
        for first in range(0, max(len(slots), 1), chunk):
            part = slots[first : first + chunk]
            # Not on the model thread, where it would wait for the step under way: a step writes to none of
            # these slots. They hold committed tokens of a row; a row that gives its pages up to others while
            # they are read wants no answer any more.
            features = await asyncio.to_thread(self._engine.read_features, request.incarnation, part)
            yield target_pb2.ReadFeaturesResponse(features=codec.tensor_to_pb(features))

    @status.unary
    async def CompileGrammar(
        self, request: target_pb2.CompileGrammarRequest, context: status.Context
    ) -> target_pb2.CompileGrammarResponse:
        # A call that is cancelled, or past its deadline, cancels the future.
        await asyncio.wrap_future(self._engine.compile_grammar(codec.grammar_from_pb(request.grammar)))
        return target_pb2.CompileGrammarResponse()


def _opened(grant: Grant) -> target_pb2.ExecuteTargetResponse:
    return target_pb2.ExecuteTargetResponse(opened=codec.grant_to_pb(grant))


def _result(result: TargetResult) -> target_pb2.ExecuteTargetResponse:
    return target_pb2.ExecuteTargetResponse(result=codec.target_result_to_pb(result))


def _refused(refused: types_pb2.StepRefused) -> target_pb2.ExecuteTargetResponse:
    return target_pb2.ExecuteTargetResponse(refused=refused)
