"""One line of the log for each call of a client, once it is over: what was asked for, what it took, how it ended.

It has counts, times and names, never a text: of a call that is refused for what it says, the field is named and no
value, as that may be part of a prompt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.core.requests import Request
from orchestrator.outputs import Event, Finished, Piece
from pilotfish.errors import PilotfishError
from pilotfish.logs import fields

log = logging.getLogger(__name__)

_MAX_TEXT = 200


class RequestLog:
    """Follows the events of a call, whatever protocol it came by, and writes its line.

    Args:
        protocol: that it came by.
        call: what was called, without what a client may have written into it.
        model: name of the model served.
        is_probe: it comes over and over, and is not worth a line even where it fails.

    Attributes:
        given_id: the id by which the client wants to find the call again; empty: none.
        answer_id: of what it is answered with; empty: it has none.
        status: of the answer, as the protocol has it.
    """

    def __init__(self, protocol: str, call: str, model: str, *, is_probe: bool = False) -> None:
        self._protocol, self._call, self._model, self._is_probe = protocol, call, model, is_probe
        self.given_id = self.answer_id = ""
        self.status: int | str = ""
        self._made_up_id = ""
        self._began_at = time.perf_counter()
        self._prompts: list[Request] = []  # the first sample of each
        self._samples = self._running = 0
        self._first_token_at: float | None = None
        self._queue_us: int | None = None
        self._completion_tokens = self._drafts = self._drafted = self._accepted = 0
        self._reasons: dict[str, None] = {}
        self._severity = logging.INFO
        self._error: dict[str, Any] = {}

    @property
    def request_id(self) -> str:
        """By which the call can be found again: the client's, or the answer's, or one made up."""
        if not (self.given_id or self.answer_id or self._made_up_id):
            self._made_up_id = f"req-{secrets.token_hex(8)}"
        return self.given_id or self.answer_id or self._made_up_id

    # As a watcher of the events of what it asked for

    def began(self, requests: Sequence[Request]) -> None:
        """One of its prompts was taken."""
        self._prompts.append(requests[0])
        self._samples += len(requests)
        self._running += len(requests)

    def saw(self, event: Event | PilotfishError) -> None:
        """Counts an event as it is made."""
        if isinstance(event, Piece):
            self._first_token_at = self._first_token_at or time.perf_counter()
            self._completion_tokens += len(event.token_ids)
            self._drafts += event.drafted > 0
            self._drafted += event.drafted
            self._accepted += event.accepted
        elif isinstance(event, Finished):
            self._running -= 1
            self._reasons[event.reason.name.lower()] = None
            self._queue_us = max(self._queue_us or 0, event.usage.queue_us)
        elif isinstance(event, PilotfishError):
            self._running -= 1

    def closed(self) -> None:
        """Nobody waits any more for what has not ended."""

    # Its end

    def failed(self, status: int | str, severity: int, kind: str, field: str | None, message: str | None) -> None:
        """It was refused, or failed on the way; the first time counts.

        Args:
            status: as the protocol has it.
            severity: of logging.
            kind: of error, for a program.
            field: of the request that is at fault.
            message: for a person; None where it may quote what the client wrote.
        """
        if self._error:
            return
        self.status, self._severity = status, severity
        self._error = {"error": kind, "param": _printable(field), "error_message": _printable(message)}
        self._reasons = {"error": None}

    def write(self) -> None:
        """Writes the line, at a severity that fits how the call ended."""
        if self._running and not self._error:
            self._reasons = {"abort": None}  # the client left
        is_worth_it = bool(self._prompts or self._error) and not self._is_probe
        severity = self._severity if is_worth_it else logging.DEBUG
        if log.isEnabledFor(severity):
            values = {name: value for name, value in self._values().items() if value is not None}
            log.log(severity, "%s", _told(values), extra=fields(event="request", **values))

    def _values(self) -> dict[str, Any]:
        """What JSON says; None where there is nothing to say."""
        first, now = self._first_token_at, time.perf_counter()
        values: dict[str, Any] = {
            "request_id": self.request_id,
            "answer_id": self.answer_id if self.answer_id not in ("", self.request_id) else None,
            "protocol": self._protocol,
            "call": self._call,
            "model": self._model,
            "status": self.status,
            "finish_reason": ",".join(self._reasons) or None,
            **(self._error or {}),
            "queue_ms": None if self._queue_us is None else _ms(self._queue_us / 1e6),
            "first_token_ms": None if first is None else _ms(first - self._began_at),
            "total_ms": _ms(now - self._began_at),
        }
        return values | (self._counts() if self._prompts else {})

    def _counts(self) -> dict[str, Any]:
        cached = [prompt.cached_tokens for prompt in self._prompts if prompt.cached_tokens is not None]
        counts = {
            "prompt_tokens": sum(len(prompt.prompt) for prompt in self._prompts),
            "cached_tokens": sum(cached) if cached else None,
            "completion_tokens": self._completion_tokens,
            "sample_count": self._samples,
        }
        if not self._drafted:
            return counts
        return counts | {
            "drafted": self._drafted,
            "accepted": self._accepted,
            "acceptance_rate": round(self._accepted / self._drafted, 4),
            "acceptance_length": round(1 + self._accepted / self._drafts, 3),
        }


def _told(values: dict[str, Any]) -> str:
    """The same in words."""
    answer = f" ({values['answer_id']})" if "answer_id" in values else ""
    head = f"{values['request_id']}{answer} {values['protocol']} {values['call']}"
    parts = [_told_tokens(values), _told_end(values), _told_times(values), _told_drafts(values)]
    return f"{head}: {'; '.join(part for part in parts if part)}"


def _told_tokens(values: dict[str, Any]) -> str:
    if "prompt_tokens" not in values:
        return ""
    cached = f" ({values['cached_tokens']} cached)" if values.get("cached_tokens") else ""
    return f"{values['prompt_tokens']} prompt tokens{cached}, {values['completion_tokens']} completion tokens"


def _told_end(values: dict[str, Any]) -> str:
    if "error" not in values:
        return str(values.get("finish_reason", values["status"]))
    param = f" ({values['param']})" if "param" in values else ""
    message = f": {values['error_message']}" if "error_message" in values else ""
    return f"{values['status']} {values['error']}{param}{message}"


def _told_times(values: dict[str, Any]) -> str:
    names = (("queue_ms", "queue"), ("first_token_ms", "first token"), ("total_ms", "total"))
    return ", ".join(f"{name} {_duration(values[key])}" for key, name in names if key in values)


def _told_drafts(values: dict[str, Any]) -> str:
    if "drafted" not in values:
        return ""
    counts = f"{values['accepted']} of {values['drafted']} draft tokens accepted ({values['acceptance_rate']:.0%})"
    return f"{counts}, acceptance length {values['acceptance_length']:.2f}"


def _printable(text: str | None) -> str | None:
    """Not too long, on one line, and without what a terminal would obey; clients may have written part of it."""
    if text is None:
        return None
    return "".join(character if character.isprintable() else " " for character in text[:_MAX_TEXT])


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
