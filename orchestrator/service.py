"""The Generation service: messages to requests, events to messages."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import grpc

from orchestrator.admission import Asked, check_request_id
from orchestrator.core.acceptance import Rule, TokenKind
from orchestrator.core.logprobs import draft_logprobs
from orchestrator.core.requests import TokenLogprobs
from orchestrator.core.rounds import Judged
from orchestrator.generation import Ask, Generation, made_up_id
from orchestrator.outputs import Event, Finished, Prompt
from orchestrator.request_log import RequestLog
from orchestrator.usage import RoundTimes, Usage
from pilotfish.errors import PilotfishError, refusal
from pilotfish.rpc.status import code_of, streaming, unary
from pilotfish.steps import require
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_ID_KEY = "x-request-id"
"""Of the metadata: by which a client, or a proxy, wants to find the call again."""

_SEVERITIES = {
    grpc.StatusCode.INTERNAL: logging.ERROR,
    grpc.StatusCode.UNAVAILABLE: logging.WARNING,
    grpc.StatusCode.RESOURCE_EXHAUSTED: logging.WARNING,
    grpc.StatusCode.DEADLINE_EXCEEDED: logging.WARNING,
}
"""How bad a status is for whoever runs the server; others are a client's fault."""

_KINDS = {kind: f"TOKEN_KIND_{kind.name}" for kind in TokenKind}


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """``Generation`` over gRPC."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @streaming
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """See generation.proto."""
        log = RequestLog("grpc", "Generate", self._generation.info().model)
        with _written(log):
            await _take_id(log, request, context)
            ask = Ask(
                prompt=await self._prompt(request),
                asked=_asked(request.sampling),
                is_text=request.WhichOneof("prompt") == "text",
                model=request.model,
                request_id=log.answer_id,
                priority=request.priority,
                timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
            )
            async with self._generation.begin(ask, log) as answer:
                names = ("request_id", "model", "prompt_token_count", "sample_count")
                yield pb.GenerateResponse(started=pb.Started(**{name: getattr(answer, name) for name in names}))
                likeliest = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
                async for event in answer:
                    yield _response(event, likeliest)
            log.status = grpc.StatusCode.OK.name

    @unary
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """See generation.proto."""
        return pb.GetServerInfoResponse(**asdict(self._generation.info()))

    @unary
    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        """See generation.proto."""
        fields, drafters = self._generation.offer()
        return pb.GetCapabilitiesResponse(
            fields=[
                pb.FieldCapability(
                    name=field.name,
                    range=field.range,
                    default=field.default,
                    honoured=not field.why_not,
                    reason=field.why_not,
                )
                for field in fields
            ],
            drafters=[
                pb.DrafterCapability(
                    model=drafter.model,
                    scheme=drafter.scheme,
                    acceptance_rules=[f"ACCEPTANCE_RULE_{rule.name}" for rule in drafter.rules],
                    grows_trees=drafter.grows_trees,
                    replica_count=drafter.replica_count,
                )
                for drafter in drafters
            ],
        )

    async def _prompt(self, request: pb.GenerateRequest) -> Sequence[int]:
        is_cut = request.sampling.HasField("truncate_prompt_tokens")
        match request.WhichOneof("prompt"):
            case "text":
                return await self._generation.encode(request.text, is_cut=is_cut)
            case "token_ids":
                return request.token_ids.ids
            case "messages":
                messages = [{"role": m.role, "content": m.content} for m in request.messages.messages]
                return await self._generation.encode_chat(messages, is_cut=is_cut)
            case _:
                raise refusal("prompt", "missing", "give one of text, token_ids and messages")


@contextmanager
def _written(log: RequestLog) -> Iterator[None]:
    """Writes the line of a call once it is over, with the status of the error that ended it."""
    try:
        yield
    except Exception as error:
        code = code_of(error)
        may_quote = code is grpc.StatusCode.INVALID_ARGUMENT  # what the client wrote, its prompt among it
        field = error.field if isinstance(error, PilotfishError) else None
        log.failed(code.name, _SEVERITIES.get(code, logging.INFO), code.name, field, None if may_quote else str(error))
        raise
    finally:
        log.write()


async def _take_id(log: RequestLog, request: pb.GenerateRequest, context: Context) -> None:
    """Finds out the ids of a call, and tells its own in the initial metadata, whatever becomes of it.

    Raises:
        InvalidArgumentError: one of those given could not stand in a header and in a line of a log.
    """
    try:
        check_request_id("request_id", request.request_id)
        log.answer_id = request.request_id or made_up_id()
        given = dict(context.invocation_metadata() or ()).get(_ID_KEY, "")
        log.given_id = check_request_id(_ID_KEY, given if isinstance(given, str) else "")
    finally:
        await context.send_initial_metadata(((_ID_KEY, log.request_id),))


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
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        acceptance=Rule(sampling.acceptance) if sampling.acceptance else None,
        draft_length=given("draft_length"),
        n=given("n"),
        echo=sampling.echo,
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        logit_bias=sampling.logit_bias,
        banned_token_ids=sampling.banned_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
        min_tokens=given("min_tokens"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        adaptive_draft_length=sampling.adaptive_draft_length,
        draft_model=sampling.draft_model,
        show_proposals=sampling.show_proposals,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
        truncate_prompt_tokens=given("truncate_prompt_tokens"),
        json_schema=given("json_schema"),
        json_object=sampling.json_object,
        regex=given("regex"),
        ebnf=given("ebnf"),
        structural_tag=given("structural_tag"),
    )


def _response(event: Event, likeliest: int | None) -> pb.GenerateResponse:
    """An event as a message; ``likeliest`` is what the request asked for as ``logprobs``."""
    if isinstance(event, Finished):
        reason = f"FINISH_REASON_{event.reason.name}"
        finished = pb.Finished(reason=reason, usage=_usage(event.usage), index=event.index)
        return pb.GenerateResponse(finished=finished)
    if isinstance(event, Prompt):
        prompt = pb.Prompt(token_texts=event.token_texts, token_ids=event.token_ids, logprobs=_logprobs(event.logprobs))
        return pb.GenerateResponse(prompt=prompt)
    return pb.GenerateResponse(
        piece=pb.Piece(
            token_texts=event.token_texts,
            token_ids=event.token_ids,
            kinds=[_KINDS[kind] for kind in event.kinds],
            drafted=event.drafted,
            accepted=event.accepted,
            times=_times(event.times),
            index=event.index,
            logprobs=_logprobs(event.logprobs),
            proposal=None if event.judged is None else _proposal(event.judged, likeliest),
        )
    )


def _proposal(judged: Judged, likeliest: int | None) -> pb.Proposal:
    proposal = judged.proposal
    logprobs = () if likeliest is None else draft_logprobs(proposal, likeliest)
    return pb.Proposal(
        token_ids=proposal.token_ids, parents=proposal.parents, accepted=judged.path, logprobs=_logprobs(logprobs)
    )


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=token.logprob,
            top_token_ids=[token_id for token_id, _ in token.top],
            top_logprobs=[logprob for _, logprob in token.top],
        )
        for token in tokens
    ]


def _usage(usage: Usage) -> pb.Usage:
    values = asdict(usage) | {"round_total": _times(usage.round_total), "round_median": _times(usage.round_median)}
    return pb.Usage(**values)


@lru_cache(maxsize=4)
def _times(times: RoundTimes) -> pb.RoundTimes:
    """One message for all the rows of a round."""
    return pb.RoundTimes(**asdict(times))
