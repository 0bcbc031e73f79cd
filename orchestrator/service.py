"""The Generation service: messages to requests, events to messages."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import grpc

from orchestrator.admission import Asked, Defaults, admit
from orchestrator.core.acceptance import Rule
from orchestrator.loop import Loop
from orchestrator.outputs import Finished, Output, Piece
from orchestrator.tokenizer import Tokenizer
from orchestrator.usage import RoundTimes, Usage
from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.rpc.status import streaming, unary
from pilotfish.steps import require
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served; fields as in ``GetServerInfoResponse``."""

    model: str
    version: str
    max_len: int
    vocab_size: int
    draft_length: int
    adaptive_draft_length: bool
    draft_replica_count: int
    draft_model: str
    target_ready: bool


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one model.

    Args:
        loop: runs the requests.
        tokenizer: of the model.
        defaults: where a client says nothing.
        info: describes the deployment as it is now.
    """

    def __init__(self, loop: Loop, tokenizer: Tokenizer, defaults: Defaults, info: Callable[[], ServerInfo]) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._info = info

    @streaming
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """See generation.proto."""
        model = self._info().model
        if request.model not in ("", model):
            raise NotFoundError(f"model is {request.model!r}; this server has {model!r}")
        prompt = await asyncio.to_thread(self._prompt, request)
        asked = _asked(request.sampling)
        job = admit(request.request_id or f"gen-{secrets.token_hex(8)}", prompt, asked, self._defaults)
        output = Output(self._tokenizer.detokenizer(), asked.stop)
        self._loop.submit(job, output)
        try:
            started = pb.Started(request_id=job.id, model=model, prompt_token_count=len(prompt))
            yield pb.GenerateResponse(started=started)
            event: Piece | Finished | None = None
            while not isinstance(event, Finished):
                event = await output.next_event()
                yield _response(event)
        finally:
            self._loop.cancel(job)

    @unary
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """See generation.proto."""
        return pb.GetServerInfoResponse(**asdict(self._info()))

    def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return self._tokenizer.encode(request.text)
            case "token_ids":
                return list(request.token_ids.ids)
            case "messages":
                messages = [{"role": m.role, "content": m.content} for m in request.messages.messages]
                return self._tokenizer.encode_chat(messages)
            case _:
                raise InvalidArgumentError("prompt is missing; give one of text, token_ids and messages")


def _asked(sampling: pb.SamplingParams) -> Asked:
    def given(name: str) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else None

    known = [int(rule) for rule in Rule]
    require(sampling.acceptance in (0, *known), "acceptance", sampling.acceptance, f"must be one of {known}")
    return Asked(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=given("seed"),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        acceptance=Rule(sampling.acceptance) if sampling.acceptance else None,
        draft_length=given("draft_length"),
    )


def _response(event: Piece | Finished) -> pb.GenerateResponse:
    if isinstance(event, Finished):
        finished = pb.Finished(reason=int(event.reason), usage=_usage(event.usage))  # type: ignore[arg-type]
        return pb.GenerateResponse(finished=finished)
    return pb.GenerateResponse(
        piece=pb.Piece(
            token_texts=event.token_texts,
            token_ids=event.token_ids,
            kinds=event.kinds,  # type: ignore[arg-type]
            drafted=event.drafted,
            times=_times(event.times),
        )
    )


def _usage(usage: Usage) -> pb.Usage:
    values = asdict(usage) | {"round_total": _times(usage.round_total), "round_median": _times(usage.round_median)}
    return pb.Usage(**values)


@lru_cache(maxsize=4)
def _times(times: RoundTimes) -> pb.RoundTimes:
    """One message for all the rows of a round."""
    return pb.RoundTimes(**asdict(times))
