"""The one place where Pilotfish's errors become HTTP statuses, in the shape of OpenAI's."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.request_log import RequestLog
from pilotfish import errors

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What clients are told to wait where too much is waiting already, or the target is away."""

LOG = "log"
"""The ``RequestLog`` of a call in the state of its scope."""

_INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for a person; names field, value and limit.
        kind: OpenAI's ``type``.
        param: the field of the request that is at fault, as ``messages[0].role``.
        code: for a program.
        headers: beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = _INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The error as an answer."""
        return _ErrorResponse(self)

    def note(self, scope: Scope) -> None:
        """Puts it into the call's line of the log."""
        log: RequestLog | None = scope.get("state", {}).get(LOG)
        if log is not None:
            error = self.body["error"]
            may_quote = self.status == 400  # what the client wrote, its prompt among it
            message = None if may_quote else error["message"]
            log.failed(
                self.status, _severity(self.status), str(error["code"] or error["type"]), error["param"], message
            )


class _ErrorResponse(Response):
    """An error on its way to the client, and into the log."""

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        # In ASCII: what is quoted may be no text in Unicode.
        super().__init__(json.dumps(error.body), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._error.note(scope)
        await super().__call__(scope, receive, send)


def _severity(status: int) -> int:
    """How bad it is for whoever runs the server: a bug, a server that is too small or away, or a client's fault."""
    if status in (408, 429, 503):
        return logging.WARNING
    return logging.ERROR if status >= 500 else logging.INFO


@dataclass(frozen=True)
class _Kind:
    status: int
    type: str = _INVALID
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_RETRY = {"Retry-After": str(RETRY_AFTER_S)}
# OpenAI's client tries again after 408 and 409 by itself: senseless where the request sets its own deadline.
_NO_RETRY = {"x-should-retry": "false"}

_KINDS: dict[type[errors.PilotfishError], _Kind] = {
    errors.InvalidArgumentError: _Kind(400, code="invalid_value"),
    errors.NotFoundError: _Kind(404, code="model_not_found"),
    errors.AlreadyExistsError: _Kind(409, code="already_exists", headers=_NO_RETRY),
    errors.OverloadedError: _Kind(429, "rate_limit_error", "rate_limit_exceeded", _RETRY),
    errors.FailedPreconditionError: _Kind(400, code="unsupported_value"),
    errors.DeadlineExceededError: _Kind(408, "timeout_error", "timeout", _NO_RETRY),
    errors.UnavailableError: _Kind(503, "service_unavailable_error", "service_unavailable", _RETRY),
    errors.InternalError: _Kind(500, "server_error", "internal_error"),
}


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """The answer that an error stands for; a bug is logged with its traceback.

    Args:
        error: whatever was raised.
        names: what the request calls fields that the rest of Pilotfish calls otherwise.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, errors.PilotfishError):
        log.error("a request failed", exc_info=error)
        error = errors.InternalError(f"{type(error).__name__}: {error}")
    kind, message, param = _KINDS[type(error)], str(error), error.field
    field, bracket, rest = (param or "").partition("[")
    if (name := (names or {}).get(field)) is not None:
        message, param = message.replace(field, name, 1), name + bracket + rest
    return ApiError(kind.status, message, kind.type, param=param, code=kind.code, headers=kind.headers)


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field of the request is wrong; the message says what and why."""
    return ApiError(400, message, param=param, code=code)
