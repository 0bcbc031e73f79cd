"""The one place where Pilotfish's errors become gRPC statuses, and back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc

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

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: Exception, what: str) -> None:
    """Ends the call with the status of ``error``; a bug is logged with its traceback."""
    if isinstance(error, errors.PilotfishError):
        await context.abort(_CODES[type(error)], str(error))
    log.exception("%s failed", what)
    await context.abort(grpc.StatusCode.INTERNAL, f"{what} failed: {type(error).__name__}: {error}")


def from_grpc(error: grpc.RpcError, peer: str) -> errors.PilotfishError:
    """The Pilotfish error that a failed call stands for.

    Args:
        error: raised by a grpc or grpc.aio call.
        peer: address called, named in the message when nobody answers.
    """
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.UnavailableError(f"{peer}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        what = "is it the address of another service, a worker instead of an orchestrator say?"
        return errors.FailedPreconditionError(f"{peer} answers, but not this call; {what}")
    return _ERRORS.get(code, errors.InternalError)(details if code in _ERRORS else f"{code.name}: {details}")


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
