"""The blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from pilotfish.client.failures import failure
from pilotfish.client.results import (
    Capabilities,
    Completion,
    Fold,
    Piece,
    ServerInfo,
    capabilities_from_pb,
    server_info_from_pb,
)
from pilotfish.client.surface import Surface
from pilotfish.errors import FailedPreconditionError
from pilotfish.rpc.channel import connect_blocking
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import GenerationServiceStub


class Stream(Iterator[Piece]):
    """The pieces of one request, in order; closing it early cancels the request.

    with client.stream("Once upon a time") as stream:
        for piece in stream:
            print(piece.text, end="")
    print(stream.result.usage)
    """

    def __init__(self, call: Any, address: str, timeout_s: float | None) -> None:
        self._call = call
        self._address = address
        self._timeout_s = timeout_s
        self._fold = Fold()
        self._closed = False

    def __next__(self) -> Piece:
        """The next piece; raises what :mod:`pilotfish.errors` has if the request fails."""
        while not self._closed:
            try:
                response = next(self._call)
            except StopIteration:
                self._closed = True
                self._fold.end()
            except grpc.RpcError as error:
                if not self._closed:  # else it was closed from another thread, and this is its echo
                    self._closed = True
                    raise failure(error, self._address, self._timeout_s) from error
            else:
                if (piece := self._fold.add(response)) is not None:
                    return piece
        raise StopIteration

    @property
    def result(self) -> Completion:
        """The completion; FailedPreconditionError before the end and after an early close."""
        return self._fold.result

    def close(self) -> None:
        """Cancels the request if it still runs; the server then releases all it holds."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(Surface[Stream, Completion, ServerInfo, Capabilities]):
    """Talks to an orchestrator; threads may share one.

    with Client("127.0.0.1:50050") as client:
        print(client.generate("The capital of France is").text)
    """

    def __init__(self, address: str = "127.0.0.1:50050") -> None:
        super().__init__(address)
        self._channel = connect_blocking(self.address)
        self._stub: GenerationServiceStub | None = GenerationServiceStub(self._channel)

    def _info(self, timeout_s: float | None) -> ServerInfo:
        try:
            return server_info_from_pb(self._open_stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise failure(error, self.address, timeout_s) from error

    def _capabilities(self, timeout_s: float | None) -> Capabilities:
        try:
            request = pb.GetCapabilitiesRequest()
            return capabilities_from_pb(self._open_stub().GetCapabilities(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise failure(error, self.address, timeout_s) from error

    def _complete(self, request: pb.GenerateRequest, timeout_s: float | None) -> Completion:
        with self._open(request, timeout_s) as stream:
            for _ in stream:
                pass
            return stream.result

    def _open(self, request: pb.GenerateRequest, timeout_s: float | None) -> Stream:
        return Stream(self._open_stub().Generate(request, timeout=timeout_s), self.address, timeout_s)

    def _open_stub(self) -> GenerationServiceStub:
        if self._stub is None:
            raise FailedPreconditionError(f"this client of {self.address} is closed; make another")
        return self._stub

    def close(self) -> None:
        """Closes the connection for good; running requests are cancelled."""
        self._stub = None
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
