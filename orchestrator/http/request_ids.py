"""Every call has an id, in the headers of its answer and in its line of the log."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.admission import check_request_id
from orchestrator.http.errors import LOG, api_error
from orchestrator.request_log import RequestLog
from pilotfish.errors import InvalidArgumentError

HEADER = "X-Request-Id"

_MAX_PATH = 100
_PROBES = ("/health", "/metrics")


class RequestIds:
    """ASGI middleware, the outermost: the client's ``X-Request-Id``, or one of ours, on every answer, errors too.

    An id that could not stand in a header or in a line of a log is refused.

    Args:
        app: the next; finds the call's ``RequestLog`` in its state.
        model: name of the model served.
    """

    def __init__(self, app: ASGIApp, model: Callable[[], str]) -> None:
        self._app, self._model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, and writes its line at the end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, is_probe = f"{scope['method']} {quote(scope['path'])[:_MAX_PATH]}", scope["path"] in _PROBES
        log = RequestLog("http", call, self._model(), is_probe=is_probe)
        scope.setdefault("state", {})[LOG] = log

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = log.status or message["status"]
                MutableHeaders(scope=message)[HEADER] = log.request_id
            await send(message)

        try:
            log.given_id = check_request_id(HEADER, Headers(scope=scope).get(HEADER, ""))
        except InvalidArgumentError as error:
            await api_error(error).response()(scope, receive, answer)
        else:
            await self._app(scope, receive, answer)
        finally:
            log.write()
