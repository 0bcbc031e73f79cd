"""The one place where Pilotfish's errors become gRPC statuses, and back.

A status has the message as its text, and where a field is at fault its name, value and limit as details, in the form
that other clients know: ``google.rpc.BadRequest`` and ``google.rpc.ErrorInfo`` (AIP-193).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pilotfish import errors

log = logging.getLogger(__name__)

_CODES: dict[type[errors.PilotfishError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
SHUTTING_DOWN = "this worker is shutting down; connect to another"
_ERRORS = {code: error for error, code in _CODES.items()}

DOMAIN = "pilotfish"
"""Of every ``google.rpc.ErrorInfo``."""

# Bytes of texts: gRPC drops a status whose metadata are longer than 8 KB, message and details together.
_MESSAGE_BYTES, _DETAIL_BYTES = 1024, 256

# What gRPC says itself: the other side is no gRPC server, its name is unknown, it takes no such message. There are no
# codes for these.
_NOT_GRPC = ("Failed parsing HTTP/2", "http1.x")
_TOO_LARGE = "message larger than max"
_NO_HOST = ("Domain name not found", "DNS resolution failed", "errors resolving")

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


def code_of(error: Exception) -> grpc.StatusCode:
    """The status that a call ends with when this is raised in it."""
    return next((code for kind, code in _CODES.items() if type(error) is kind), grpc.StatusCode.INTERNAL)


async def abort(context: Context, error: Exception, what: str) -> None:
    """Ends the call with the status of ``error``; a bug is logged with its traceback."""
    if not isinstance(error, errors.PilotfishError):
        log.exception("%s failed", what)
        error = errors.InternalError(f"{what} failed: {type(error).__name__}: {error}")
    status = rpc_status.to_status(_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _status(error: errors.PilotfishError) -> status_pb2.Status:
    code, message = _CODES[type(error)], _cut(str(error), _MESSAGE_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    if error.field is not None:
        parts = {"field": error.field, "value": error.value, "limit": error.limit}
        given = {name: _cut(text, _DETAIL_BYTES) for name, text in parts.items() if text is not None}
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=code.name, domain=DOMAIN, metadata=given))
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=given["field"], description=given.get("limit", message)
            )
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def _cut(text: str, most_bytes: int) -> str:
    """The text in Unicode, or its beginning."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= most_bytes else data[: most_bytes - 3].decode("utf-8", "ignore") + "..."


def from_grpc(error: grpc.RpcError, peer: str) -> errors.PilotfishError:
    """The Pilotfish error that a failed call stands for.

    Args:
        error: raised by a grpc or grpc.aio call.
        peer: address called, named in the message when nobody answers.
    """
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(words in details for words in _NOT_GRPC):
            what = "is it the port of the HTTP API? `pilotfish up` prints both addresses, that of gRPC behind `ready`"
            return errors.FailedPreconditionError(f"{peer} answers, but not in gRPC; {what}")
        if any(words in details for words in _NO_HOST):
            return errors.UnavailableError(f"{peer}: no host of this name is known; check the address")
        return errors.UnavailableError(f"{peer}: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return errors.InvalidArgumentError(f"the request is larger than {peer} takes: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        what = "is it the address of another service, a worker instead of an orchestrator say?"
        return errors.FailedPreconditionError(f"{peer} answers, but not this call; {what}")
    if code not in _ERRORS:
        return errors.InternalError(f"{code.name}: {details}")
    return _ERRORS[code](details, **_fault(error))


def _fault(error: grpc.RpcError) -> dict[str, str]:
    """Field, value and limit, as far as the status has them."""
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return {name: info.metadata[name] for name in ("field", "value", "limit") if name in info.metadata}
    except (ValueError, DecodeError):  # somebody on the way changed them; the message says it all
        pass
    return {}


def is_shutting_down(error: errors.PilotfishError) -> bool:
    """Whether a stream ended because its worker was told to stop, rather than because it failed."""
    return isinstance(error, errors.UnavailableError) and str(error).endswith(SHUTTING_DOWN)


def streaming(
    method: Callable[[Any, Any, Context], AsyncIterator[Response]],
) -> Callable[[Any, Any, Context], AsyncIterator[Response]]:
    """Decorates a servicer method that yields responses: its errors become statuses."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Context) -> AsyncIterator[Response]:
        try:
            async for response in method(self, request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error, method.__name__)

    return call


def unary(
    method: Callable[[Any, Request, Context], Awaitable[Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Decorates a servicer method that returns one response: its errors become statuses."""

    @wraps(method)
    async def call(self: Any, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error, method.__name__)
            raise  # abort raised already; this tells the type checker

    return call
