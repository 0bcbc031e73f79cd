"""Tools in bodies: what may be called, what must be, and what was."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from orchestrator.http.bodies.base import Body, ignored, wrong, wrong_field
from orchestrator.http.bodies.forms import MAX_SCHEMA_KEYWORDS

MAX_TOOLS = 1024
"""Most tools of a conversation, and calls in one message."""


class FunctionCall(Body):
    """What an assistant called."""

    is_sent_back: ClassVar[bool] = True

    name: str
    arguments: str
    """JSON."""
    parsed_arguments: Any = ignored("OpenAI's client adds them to arguments that it has read")


class ToolCall(Body):
    """A call in the history."""

    is_sent_back: ClassVar[bool] = True

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Any = ignored("of a stream's deltas; calls are in order")


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, max_length=MAX_SCHEMA_KEYWORDS)
    """JSON Schema of the arguments; none: any object."""
    strict: bool | None = None
    """True: whatever begins like a call follows the schemas, even where the model may call or not. False: keywords of
    the schema that a grammar does not keep to are left out, rather than refused."""


class Tool(Body):
    """A tool; only functions are."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def read_choice(value: Any) -> Any:
    """For validators: a ``ToolChoice``, as chats write it."""
    if value is None or value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError as error:
        raise wrong("it must be none, auto, required or a function by its name, as OpenAI writes it") from error


def check_choice(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Returns if there are the tools that may or must be called; raises for validators."""
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise wrong_field("tools", "has two functions of the same name")
    if choice not in (None, "none") and not names:
        raise wrong_field("tool_choice", "goes with tools only")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise wrong_field("tool_choice", f"names {choice.function.name!r}, which tools has not")
