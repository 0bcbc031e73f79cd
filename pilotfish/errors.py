"""The errors of Pilotfish, one small tree, the same on both sides of the wire.

A service raises them, ``pilotfish.rpc.status`` turns them into gRPC statuses, and the client
raises the same class again.
"""

from __future__ import annotations

_SHOWN = 120  # characters of a value


class PilotfishError(Exception):
    """Anything that Pilotfish reports; catch this to catch all.

    Args:
        message: one sentence, for a person.
        field: of the request that is at fault, where one is.
        value: that it has, as the message shows it.
        limit: that it breaks, as the message says it.
    """

    def __init__(
        self, message: str = "", field: str | None = None, value: str | None = None, limit: str | None = None
    ) -> None:
        super().__init__(message)
        self.field, self.value, self.limit = field, value, limit


class InvalidArgumentError(PilotfishError):
    """The caller's input breaks a rule; the message names field, value and limit."""


def refusal(field: str, value: object, limit: str) -> InvalidArgumentError:
    """The error for a field whose value breaks a rule: "FIELD is VALUE; LIMIT"."""
    shown = shortened(str(value))
    return InvalidArgumentError(f"{field} is {shown}; {limit}", field, shown, limit)


def shortened(text: str) -> str:
    """The text, or its beginning where it is too long for a message; what a client sent may be megabytes."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def shown(value: object) -> str:
    """A value as Python writes it, for a message."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"of {type(value).__name__}, and too long to be shown"


class NotFoundError(PilotfishError):
    """What the caller named does not exist: a model, a file, an incarnation."""


class AlreadyExistsError(PilotfishError):
    """The name is taken, as by a running request with the same id."""


class OverloadedError(PilotfishError):
    """Too much is waiting already; try again later."""


class FailedPreconditionError(PilotfishError):
    """The request is sound, but this deployment cannot do it."""


class DeadlineExceededError(PilotfishError):
    """The caller's deadline passed; what was generated until then is lost."""


class UnavailableError(PilotfishError):
    """Nobody answers, or the service is shutting down; the same request may succeed later."""


class InternalError(PilotfishError):
    """A bug in Pilotfish; the message is worth a report."""
