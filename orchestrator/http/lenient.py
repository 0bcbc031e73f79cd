"""Leniency: with ``--lenient`` unknown fields are passed over, and the answer's Warning header names them.

Without it they are refused, so that nobody waits for the effect of a name that was misspelt.
"""

from __future__ import annotations

from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_NAMES = 32
_MAX_LENGTH = 64

_passed_over: ContextVar[dict[str, None] | None] = ContextVar("passed_over", default=None)


def pass_over(name: str) -> bool:
    """Whether an unknown field may be passed over; if so, the answer will name it."""
    names = _passed_over.get()
    if names is None:
        return False
    names[name] = None
    return True


class Lenient:
    """ASGI middleware within which unknown fields are passed over.

    The header is ``Warning: 299 - "ignored: foo, bar"`` (RFC 7234, section 5.5: a persistent one, of no named agent).

    Args:
        app: the next.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on, and names in the answer what was passed over."""
        names: dict[str, None] = {}

        async def warn(message: Message) -> None:
            if message["type"] == "http.response.start" and names:
                MutableHeaders(scope=message).append("Warning", _warning(list(names)))
            await send(message)

        token = _passed_over.set(names)
        try:
            await self._app(scope, receive, warn)
        finally:
            _passed_over.reset(token)


def _warning(names: list[str]) -> str:
    shown = [_printable(name) for name in names[:_MAX_NAMES]]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return f'299 - "ignored: {", ".join(shown + more)}"'


def _printable(name: str) -> str:
    """A name as it may stand between the quotes of a header."""
    text = name[:_MAX_LENGTH].encode("ascii", "backslashreplace").decode()
    return "".join(each if each.isprintable() and each not in '"\\,' else "?" for each in text)
