"""What every request body shares: strict types, no unknown field, and what is refused or ignored says so by name.

A field of a body is one of three: honoured (anything declared as usual), ``refused`` (known from OpenAI or vLLM, not
offered here, with the reason), or ``ignored`` (it would not change the text). ``docs/openai.md`` lists all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, ClassVar

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from orchestrator.http.errors import ApiError
from orchestrator.http.lenient import pass_over
from pilotfish.errors import shortened
from pilotfish.settings import said_of

_LONGEST_NAME = 64  # that may be a slip of the pen
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60

_MUST = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a text",
}
"""What to say of a value of the wrong type."""


class Body(BaseModel):
    """Base of everything that a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    is_sent_back: ClassVar[bool] = False
    """Clients make it of answers, with null in all fields that their classes have; of unknown ones it asks nothing."""

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, given: Any) -> Any:
        """Refuses, in one sentence, what no field is called, and what is not offered."""
        if not isinstance(given, Mapping):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if cls.is_sent_back:
            given = {name: value for name, value in given.items() if name in fields or value is not None}
        given = {name: value for name, value in given.items() if name in fields or not pass_over(name)}
        for name, value in given.items():
            if (field := fields.get(name)) is None:
                raise _fault("unknown_parameter", name, f"is not a known field{_hint(name, fields)}")
            count, most = len(value) if isinstance(value, list | dict) else 0, _most(field)
            if most is not None and count > most:  # before anything is done for each
                raise _fault("invalid_value", name, f"has {count} items; at most {most} are allowed")
            if (refusal := refusal_of(field)) is not None and value is not None and value not in refusal.harmless:
                raise _fault("unsupported_parameter", name, f"is not supported: {refusal.why}")
            try:
                if what := _unsound(value):
                    raise _fault("invalid_value", name, f"has {what}")
            except RecursionError as error:
                raise _fault("invalid_value", name, "is nested too deeply") from error
        return given


class Refusal:
    """Why a field is not offered, and the values that ask for nothing."""

    def __init__(self, why: str, harmless: tuple[Any, ...]) -> None:
        self.why = why
        self.harmless = harmless


def refused(why: str, *harmless: Any) -> Any:
    """Declares a field that is not offered; null and the ``harmless`` values pass."""
    declared: Any = Field(None, description=f"Refused: {why}")
    declared.metadata.append(Refusal(why, harmless))
    return declared


def ignored(why: str) -> Any:
    """Declares a field that may be sent and changes nothing."""
    return Field(None, description=why, json_schema_extra={"ignored": True})


def refusal_of(field: FieldInfo) -> Refusal | None:
    """Why the field is refused; None if it is not."""
    return next((item for item in field.metadata if isinstance(item, Refusal)), None)


def _most(field: FieldInfo) -> int | None:
    """Items that the field may have; None if it does not say."""
    return next((item.max_length for item in field.metadata if isinstance(item, MaxLen)), None)


def is_ignored(field: FieldInfo) -> bool:
    """Whether the field changes nothing."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("ignored"))


def wrong(message: str) -> PydanticCustomError:
    """For validators: the value breaks a rule; ``message`` goes on after the name and the value."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def wrong_field(name: str, message: str) -> PydanticCustomError:
    """For validators of a whole body: one field does not go with another; ``message`` goes on after its name."""
    return _fault("invalid_value", name, message)


def body_error(faults: Iterable[ErrorDetails]) -> ApiError:
    """The answer to a body that was refused: its first fault."""
    fault = next(iter(faults))
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', fault['msg'])}", code="invalid_json")
    param = _param((*fault["loc"], *([context["name"]] if "name" in context else [])))
    if "name" in context:
        return ApiError(400, f"{param} {context['message']}", param=param, code=kind)
    if kind == "missing":
        return ApiError(
            400, f"{param or 'the body'} is missing", param=param or None, code="missing_required_parameter"
        )
    if not param:
        return ApiError(400, f"the body is no JSON object: {_SHORT.repr(fault['input'])}", code="invalid_type")
    message = context["message"] if kind == "invalid_value" else _sentence(fault)
    code = "invalid_type" if kind in _MUST else "invalid_value"
    return ApiError(400, f"{param} is {_SHORT.repr(fault['input'])}; {message}", param=param, code=code)


def _unsound(value: Any) -> str:
    """What is in a value that Python reads and JSON does not know; empty if nothing is."""
    if isinstance(value, str):  # JSON's escapes may stand for what could not be written as UTF-8
        is_text = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return "" if is_text else "half of a surrogate pair, which is no character"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}, which JSON does not know"
    if isinstance(value, Mapping):
        return next((what for pair in value.items() for each in pair if (what := _unsound(each))), "")
    if not isinstance(value, list) or set(map(type, value)) <= {int}:  # token ids may be many
        return ""
    return next((what for each in value if (what := _unsound(each))), "")


def _fault(kind: Any, name: str, message: str) -> PydanticCustomError:
    name = shortened(name.encode("ascii", "backslashreplace").decode())  # it may be no text in Unicode
    return PydanticCustomError(kind, "{message}", {"name": name, "message": message})


def _hint(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else ()
    return f"; did you mean {found[0]}?" if found else ""


def _param(places: tuple[int | str, ...]) -> str:
    """``("body", "messages", 0, "role")`` as ``messages[0].role``."""
    text = ""
    for place in places[1:] if places[:1] == ("body",) else places:
        text += f"[{place}]" if isinstance(place, int) else f".{place}" if text else place
    return text


def _sentence(fault: ErrorDetails) -> str:
    if (must := _MUST.get(fault["type"])) is not None:
        return f"it must be {must}"
    message = said_of(fault).replace("Input should", "It must", 1)
    return message[:1].lower() + message[1:]
