"""DraftService on the wire: messages to steps and back, no decisions."""

from __future__ import annotations

from functools import partial
from typing import Any

from draft_svc.engine import DraftEngine
from pilotfish.rpc import codec, status
from pilotfish.rpc.steps_service import ModelThread, StepStreams, Wire
from pilotfish.steps import Capabilities, DraftResult, DraftStep, Grant
from pilotfish.v1 import draft_pb2, draft_pb2_grpc, types_pb2

NAME = "pilotfish.v1.DraftService"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one engine on one model thread."""

    def __init__(self, engine: DraftEngine, thread: ModelThread) -> None:
        opened = partial(_opened, engine.capabilities)
        wire = Wire[DraftStep, DraftResult](codec.draft_step_from_pb, opened, _result, _refused)
        self.streams = StepStreams(engine, thread, wire)

    @status.unary
    async def Execute(self, request_iterator: Any, context: status.Context) -> None:
        await self.streams.serve(context)


def _opened(capabilities: Capabilities, grant: Grant) -> draft_pb2.ExecuteDraftResponse:
    return draft_pb2.ExecuteDraftResponse(opened=codec.draft_opened_to_pb(grant, capabilities))


def _result(result: DraftResult) -> draft_pb2.ExecuteDraftResponse:
    return draft_pb2.ExecuteDraftResponse(result=codec.draft_result_to_pb(result))


def _refused(refused: types_pb2.StepRefused) -> draft_pb2.ExecuteDraftResponse:
    return draft_pb2.ExecuteDraftResponse(refused=refused)
