"""A GenerationService that plays a script, for tests of the client and the command line."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc

KINDS = {"a": pb.TOKEN_KIND_ACCEPTED, "r": pb.TOKEN_KIND_RECOVERED, "b": pb.TOKEN_KIND_BONUS}
INFO = pb.GetServerInfoResponse(
    model="tiny", version="1", max_len=64, vocab_size=9, draft_length=4, adaptive_draft_length=True,
    draft_replica_count=1, draft_model="d", target_ready=True,
)  # fmt: skip
CAPABILITIES = pb.GetCapabilitiesResponse(
    fields=[
        pb.FieldCapability(name="n", range="[1, 128]", default="1", honoured=True),
        pb.FieldCapability(name="logprobs", range="[0, 20]", default="none", honoured=False, reason="none here"),
    ],
    drafters=[
        pb.DrafterCapability(
            model="d", scheme="mtp", acceptance_rules=[pb.ACCEPTANCE_RULE_MATCH, pb.ACCEPTANCE_RULE_RATIO],
            grows_trees=True, replica_count=2,
        )
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Status:
    """Ends the call with a status."""

    code: grpc.StatusCode
    details: str


class Wait:
    """Holds the call until ``go`` is set or the client leaves."""

    def __init__(self) -> None:
        self.go = threading.Event()


Script = Sequence[pb.GenerateResponse | Status | Wait]


def started() -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(request_id="r1", model="tiny", prompt_token_count=3))


def piece(*tokens: tuple[int, str, str], drafted: int = 0) -> pb.GenerateResponse:
    """Tokens as (id, text, kind's first letter)."""
    return pb.GenerateResponse(
        piece=pb.Piece(
            token_ids=[token[0] for token in tokens],
            token_texts=[token[1] for token in tokens],
            kinds=[KINDS[token[2]] for token in tokens],
            drafted=drafted,
            times=pb.RoundTimes(target_us=4, draft_us=3, hops_us=2, orchestrator_us=1),
        )
    )


def finished(reason: pb.FinishReason = pb.FINISH_REASON_LENGTH) -> pb.GenerateResponse:
    usage = pb.Usage(
        prompt_tokens=3, completion_tokens=4, cached_tokens=1, rounds=2, drafted=4, accepted=2,
        accepted_per_position=[2, 0], drafted_per_position=[2, 2], queue_us=5, first_token_us=6, total_us=2_000_000,
        round_total=pb.RoundTimes(target_us=8, draft_us=6, hops_us=4, orchestrator_us=2),
        round_median=pb.RoundTimes(
            target_us=4000, draft_us=3000, hops_us=2000, orchestrator_us=1000, feature_read_us=500, feature_bytes=9000
        ),
        preemptions=1,
    )  # fmt: skip
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage))


def answer() -> Script:
    """A whole answer, "Hé\\tyo!", in two rounds; the é is split over two tokens."""
    return [
        started(),
        piece((1, "H", "b")),
        piece((2, "", "a"), (3, "é\t", "r"), drafted=2),
        piece((4, "yo!", "b"), drafted=2),
        finished(),
    ]


@dataclass
class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Plays ``script`` to every Generate call and keeps the requests."""

    script: Script = field(default_factory=answer)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a call ends, as when its client cancels it."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        left = threading.Event()
        context.add_callback(lambda: (left.set(), self.left.set()))
        for step in self.script:
            if isinstance(step, Status):
                context.abort(step.code, step.details)
            elif isinstance(step, Wait):
                while not step.go.wait(0.01) and not left.is_set():
                    pass
            else:
                yield step

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return INFO

    def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Any) -> pb.GetCapabilitiesResponse:
        return CAPABILITIES


@contextmanager
def serving(fake: FakeGeneration, healthy: bool = True) -> Iterator[str]:
    """Serves on a free port of the loopback; yields ``host:port``."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        server = grpc.server(pool)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
        status = health.HealthServicer()
        state = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        status.set("", state)
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def unused_address() -> str:
    """An address that nobody listens on: the port was free a moment ago."""
    with serving(FakeGeneration()) as address:
        return address
