"""Errors on the wire: the same class with the same parts on the other side, in a form that other clients know."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pilotfish import AsyncClient, Client, errors
from pilotfish.client.health import check
from pilotfish.rpc import status
from pilotfish.rpc.channel import connect_blocking
from pilotfish.rpc.server import Server
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc

SAID_BY_THE_CLIENT = (errors.UnavailableError, errors.DeadlineExceededError)
"""Errors that the client words itself: a server may be none that says anything."""


class Refusing(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every call with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @status.unary
    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        raise self._error

    @status.streaming
    async def Generate(self, request: Any, context: Any) -> Any:
        yield pb.GenerateResponse(started=pb.Started())
        raise self._error


@contextmanager
def refusing(error: Exception) -> Iterator[str]:
    """Serves on a loop of its own; yields the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Server:
        server = Server("127.0.0.1:0", "pilotfish.v1.GenerationService")
        server.add(lambda to: generation_pb2_grpc.add_GenerationServiceServicer_to_server(Refusing(error), to))
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def raised_by(call: str, address: str) -> errors.PilotfishError:
    async def ask_async() -> None:
        async with AsyncClient(address) as client:
            await client.generate("x")

    def ask() -> None:
        if call == "asyncio":
            asyncio.run(ask_async())
        with Client(address) as client:
            client.server_info() if call == "unary" else client.generate("x")

    with pytest.raises(errors.PilotfishError) as caught:
        ask()
    return caught.value


@pytest.mark.parametrize("call", ["unary", "stream", "asyncio"])
def test_field_value_and_limit_arrive_whatever_the_call(call: str) -> None:
    with refusing(errors.refusal("top_p", 2.5, "must be in (0, 1]")) as address:
        found = raised_by(call, address)
    assert type(found) is errors.InvalidArgumentError
    assert str(found) == "top_p is 2.5; must be in (0, 1]"
    assert (found.field, found.value, found.limit) == ("top_p", "2.5", "must be in (0, 1]")


@pytest.mark.parametrize(
    "kind", [each for each in status._CODES if each not in SAID_BY_THE_CLIENT], ids=lambda kind: kind.__name__
)
def test_every_error_may_name_a_field(kind: type[errors.PilotfishError]) -> None:
    with refusing(kind("no such thing", "model")) as address:
        found = raised_by("unary", address)
    assert type(found) is kind
    assert (found.field, found.value, found.limit) == ("model", None, None)


def test_other_clients_find_the_details_that_they_know() -> None:
    with (
        refusing(errors.refusal("n", 0, "must be at least 1")) as address,
        connect_blocking(address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        generation_pb2_grpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    details = rpc_status.from_call(caught.value).details
    assert details[0].Unpack(info)
    assert details[1].Unpack(request)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "pilotfish")
    assert dict(info.metadata) == {"field": "n", "value": "0", "limit": "must be at least 1"}
    assert [(each.field, each.description) for each in request.field_violations] == [("n", "must be at least 1")]


@pytest.mark.parametrize("text", ["x" * 100_000, "鱼" * 100_000, "half of a pair: \ud800"])
def test_a_message_is_no_longer_than_grpc_takes(text: str) -> None:
    error = errors.InvalidArgumentError(text, field=text, value=text, limit=text)
    with refusing(error) as address:
        found = raised_by("unary", address)
    assert type(found) is errors.InvalidArgumentError
    assert str(found)[:10] == text[:10]
    assert found.field is not None
    assert found.field[:10] == text[:10]


def test_a_bug_is_internal_and_has_no_field() -> None:
    with refusing(ZeroDivisionError("planted")) as address:
        found = raised_by("unary", address)
    assert type(found) is errors.InternalError
    assert "ZeroDivisionError: planted" in str(found)
    assert found.field is None


def test_a_status_that_somebody_changed_is_read_without_its_details() -> None:
    class Changed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.NOT_FOUND

        def details(self) -> str:
            return "gone"

        def trailing_metadata(self) -> Any:
            return (("grpc-status-details-bin", b"\xff nonsense"),)

    found = status.from_grpc(Changed(), "somewhere")
    assert type(found) is errors.NotFoundError
    assert (str(found), found.field) == ("gone", None)


# What is no gRPC server


@contextmanager
def http_server() -> Iterator[str]:
    """Answers whatever is said to it as a server of HTTP/1 does that does not understand."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_port_of_the_http_api_is_told_from_nobody() -> None:
    with http_server() as address:
        message = f"{address} answers, but not in gRPC; is it the port of the HTTP API"
        assert str(raised_by("unary", address)).startswith(message)
        with pytest.raises(errors.FailedPreconditionError, match=message):
            check(address, 10)


def test_a_name_that_no_host_has_is_told_from_nobody() -> None:
    found = raised_by("unary", "no-such-host.invalid:50050")
    assert str(found) == "no-such-host.invalid:50050: no host of this name is known; check the address"
