"""The errors of Pilotfish, one small tree, the same on both sides of the wire.

A service raises them, ``pilotfish.rpc.status`` turns them into gRPC statuses, and the client
raises the same class again.
"""

from __future__ import annotations


class PilotfishError(Exception):
    """Anything that Pilotfish reports; catch this to catch all.

    Args:
        message: one sentence, for a person.
        field: of the request that is at fault, where one is.
    """

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidArgumentError(PilotfishError):
    """The caller's input breaks a rule; the message names field, value and limit."""


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
