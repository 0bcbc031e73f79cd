"""How every service logs to stderr: lines for people, or a JSON object a line for machines.

What a line says in numbers goes with it as ``extra=fields(...)``: in JSON under names of their own, while the text says
them in words.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

Format = Literal["text", "json"]

_log = logging.getLogger(__name__)


def fields(**values: Any) -> dict[str, Any]:
    """What to give a logger as ``extra``."""
    return {"fields": values}


def set_up(level: str, style: Format, *, times: bool = True, service: str = "") -> None:
    """Logs whatever is at least so severe, by us, uvicorn, gRPC or others, in one form.

    Args:
        level: debug, info, warning or error.
        style: of the lines; JSON ones also carry Python's warnings and the exception that ends the process.
        times: begin lines of text with date, time, severity and logger; without them only severities above info show.
        service: named in JSON lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if style == "json" else _text(times))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if style == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught


def silence_grpc_core() -> None:
    """Keeps gRPC's core from printing past Python's logging, unless the environment asks for it; before grpc is loaded.

    What it says of a taken port or a lost peer, we say too, and in words. Child processes inherit this.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def is_json() -> bool:
    """Whether lines are JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def as_json(level: str, message: str, **values: Any) -> str:
    """A line of someone who has no logger; fields as in ``JsonFormatter``."""
    return _line({"time": _time(datetime.now(UTC)), "level": level, "message": message} | values)


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time (UTC, ISO 8601), level, service, logger, message, then the fields of the record.

    Args:
        service: whose lines they are; left out if empty.
    """

    def __init__(self, service: str = "") -> None:
        super().__init__()
        self._service = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        value = {
            "time": _time(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            **self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            value["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if record.stack_info:
            value["stack"] = record.stack_info
        return _line(value)


class _Terse(logging.Formatter):
    """Where something else stamps lines: the severity, unless it is the usual one, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return prefix + super().format(record)


def _text(times: bool) -> logging.Formatter:
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s") if times else _Terse()


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


def _line(value: dict[str, Any]) -> str:
    # ASCII: what is quoted may be no text in Unicode. A value without a JSON form must not cost the line.
    return json.dumps(value, default=str)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _log.critical("%s ended it", kind.__name__, exc_info=(kind, error, trace))
