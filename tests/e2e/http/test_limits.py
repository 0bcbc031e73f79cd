"""Every field that a client may send, at and beyond its limits, over HTTP and gRPC, while another stream goes on.

The fields are those of the models of the bodies, and of the protobuf descriptors: one that is added is tried too, and a
body that is nested in one needs an example here.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import grpc
import httpx2
import pytest
from deployment import Deployment
from http_api import CHAT, MODEL, PROMPT, error
from limit_cases import FLOATS, INTEGERS, MILLION, cases
from pydantic.fields import FieldInfo
from waiting import eventually

from orchestrator.http.bodies.base import Body, is_ignored, refusal_of
from orchestrator.http.bodies.chat import ChatBody, ChatMessage
from orchestrator.http.bodies.classic import StreamOptions
from orchestrator.http.bodies.completions import CompletionBody
from orchestrator.http.bodies.forms import JsonSchema, ResponseFormat, StructuredOutputs, TextFormat
from orchestrator.http.bodies.responses import (
    ResponseBody,
    ResponseFunction,
    ResponseItem,
    ResponseReasoning,
    ResponseText,
)
from orchestrator.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.http.bodies.tools import (
    FunctionCall,
    FunctionDefinition,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from pilotfish import SamplingParams
from pilotfish.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
)
from pilotfish.rpc.channel import connect_blocking
from pilotfish.rpc.status import from_grpc
from pilotfish.runtime.loading import LoadedModel
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import GenerationServiceStub

NUMBERS: tuple[Any, ...] = (*INTEGERS, 2**200, *FLOATS)
OTHERS: tuple[Any, ...] = ("text", True, {"a": 1}, [[1]])
LISTS: tuple[Any, ...] = ([-1], [2**31], [2**63], [2**200], [1.5], [0] * MILLION)
ODD = (2**63, 2**200, float("nan"), [0] * 1000)
"""For fields that are no numbers."""

SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
EXAMPLES: dict[type[Body], dict[str, Any]] = {
    ChatMessage: {"role": "assistant", "content": "hi", "tool_calls": [CALL]},
    FunctionCall: CALL["function"],
    FunctionDefinition: FUNCTION,
    JsonSchema: {"schema": SCHEMA},
    NamedFunction: {"name": "f"},
    NamedTool: {"type": "function", "function": {"name": "f"}},
    ResponseFormat: {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    ResponseFunction: {"type": "function", **FUNCTION},
    ResponseItem: {"role": "user", "content": "hi"},
    ResponseReasoning: {"summary": "auto"},
    ResponseText: {"format": {"type": "json_schema", "schema": SCHEMA}},
    StreamOptions: {"include_usage": True},
    StructuredOutputs: {"choice": ["a"]},
    TextFormat: {"type": "json_schema", "schema": SCHEMA},
    Tool: TOOL,
    ToolCall: CALL,
}
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}),
    "/v1/chat/completions": (ChatBody, {"model": MODEL, "messages": CHAT, "max_tokens": 1}),
    "/v1/responses": (ResponseBody, {"model": MODEL, "input": PROMPT, "max_output_tokens": 1}),
    "/tokenize": (TokenizeBody, {"messages": CHAT}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": True},
    "echo": {"logprobs": 1},
}
RESPONSES_BESIDE: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [EXAMPLES[ResponseFunction]]},
    "top_logprobs": {"include": ["message.output_text.logprobs"]},
}
"""What a field goes with."""

NAMED = (InvalidArgumentError, NotFoundError, FailedPreconditionError)
"""Errors that say which field is at fault."""

Place = tuple[str | int, ...]


def places(kind: type[Body], place: Place = ()) -> Iterator[tuple[Place, FieldInfo]]:
    """Where the fields of a body are, and of the bodies in it."""
    for name, field in kind.model_fields.items():
        here = (*place, field.alias or name)
        yield here, field
        for inner, is_listed in nested(field.annotation):
            yield from places(inner, (*here, 0) if is_listed else here)


def nested(annotation: Any, is_listed: bool = False) -> Iterator[tuple[type[Body], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation, is_listed
    for each in get_args(annotation):
        yield from nested(each, is_listed or getattr(annotation, "__origin__", None) is list)


def bodies(path: str) -> Iterator[tuple[Place, Any, bytes]]:
    """Where a value was put, which, and the body."""
    for place, field in places(BODIES[path][0]):
        body, parent = body_with(path, place[:-1], str(place[0]))
        for value in values_for(field):
            parent[place[-1]] = value
            yield place, value, json.dumps(body).encode()


def values_for(field: FieldInfo) -> Iterator[Any]:
    kinds = str(field.annotation)
    if refusal_of(field) is not None or is_ignored(field):
        yield from ODD
        return
    yield from NUMBERS if "int" in kinds or "float" in kinds else ODD
    yield from OTHERS
    if "list" in kinds:
        yield from LISTS
    if "dict" in kinds:
        yield dict.fromkeys(map(str, range(100_000)), 0)


def body_with(path: str, place: Place, field: str) -> tuple[dict[str, Any], Any]:
    """A body, and the object at a place of it, made by the examples where it is not there.

    Args:
        path: of the endpoint.
        place: of the object.
        field: of the body, that the place is within.
    """
    kind, base = BODIES[path]
    beside = BESIDE.get(field, {}) | (RESPONSES_BESIDE.get(field, {}) if kind is ResponseBody else {})
    body = deepcopy(base | {name: value for name, value in beside.items() if name in kind.model_fields})
    found: Any = body
    for name in place:
        if isinstance(name, int):
            found = found[0]
            continue
        ((inner, is_listed), *_) = nested(field_of(kind, name).annotation)
        example = deepcopy(EXAMPLES[inner])
        found[name] = [example] if is_listed else example
        found, kind = found[name], inner
    return body, found


def field_of(kind: type[Body], name: str) -> FieldInfo:
    return next(field for key, field in kind.model_fields.items() if (field.alias or key) == name)


@pytest.fixture(scope="module")
def deployment(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One whose chat template takes tools."""
    folder = tmp_path_factory.mktemp("limits") / "tiny"
    shutil.copytree(tiny_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"] + "{% if tools %}{{ tools | tojson }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    with Deployment(folder, tiny_target, (tiny_draft,), http="127.0.0.1:0") as deployment:
        yield deployment


@contextmanager
def undisturbed(deployment: Deployment) -> Iterator[None]:
    """Another client that asks the same over and over, and gets the same answer."""
    params, done, found = SamplingParams(max_tokens=24, ignore_eos=True), threading.Event(), []

    def go_on() -> None:
        with deployment.client() as client:
            while not done.is_set():
                try:
                    found.append(client.generate(PROMPT, params).text)
                except Exception as failure:
                    found.append(repr(failure))
                done.wait(0.02)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
        assert eventually(lambda: len(found) > 1), "the other client gets no answers"
    finally:
        done.set()
        thread.join()
    assert set(found) == {found[0]}


@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_body_has_is_answered_or_refused_by_name(
    deployment: Deployment, http: httpx2.Client, path: str
) -> None:
    unnamed, refused = [], 0
    with undisturbed(deployment):
        for place, value, content in bodies(path):
            answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
            said = answer.text if answer.is_success else error(answer)["message"]
            refused += not answer.is_success
            if answer.status_code >= 500 or not (answer.is_success or names(place, said)):
                unnamed.append(f"{place} of {str(value)[:50]}: {answer.status_code} {said[:200]}")
    assert not unnamed, "\n".join(unnamed)
    assert refused
    deployment.check_pools()


def names(place: Place, message: str) -> bool:
    """Whether a message names the field, or the one that it is part of."""
    return any(name in message for name in place if isinstance(name, str))


def test_the_bodies_that_others_are_nested_in_are_sound(http: httpx2.Client) -> None:
    """Else nothing behind what is wrong in them would have been tried."""
    for path, (kind, _) in BODIES.items():
        for place in {place[:-1]: place for place, _ in places(kind)}:
            body, _ = body_with(path, place, str(place[0]) if place else "")
            answer = http.post(path, json=body)
            assert answer.is_success, (path, place, answer.text)


def test_whatever_a_message_has_is_answered_or_refused_by_name(deployment: Deployment) -> None:
    sampling = pb.SamplingParams(max_tokens=1)
    messages = pb.Messages(messages=[pb.Message(role="user", content="hi")])
    examples = [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=sampling),
        pb.GenerateRequest(messages=messages, sampling=sampling),
    ]
    unnamed, refused = [], 0
    with undisturbed(deployment), connect_blocking(deployment.address) as channel:
        stub = GenerationServiceStub(channel)
        for what, request in cases(*examples):
            try:
                for _ in stub.Generate(request, timeout=60):
                    pass
            except grpc.RpcError as failure:
                refused += 1
                found = from_grpc(failure, "server")
                is_named = isinstance(found, NAMED) and found.field is not None
                if not (is_named or isinstance(found, OverloadedError | DeadlineExceededError)):
                    unnamed.append(f"{what}: {type(found).__name__}: {found}")
    assert not unnamed, "\n".join(unnamed)
    assert refused > 50
    deployment.check_pools()
