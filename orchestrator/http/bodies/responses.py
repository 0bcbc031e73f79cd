"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from orchestrator.http.bodies.base import Body, ignored, refused, wrong_field
from orchestrator.http.bodies.conversation import MAX_MESSAGES, Content, Conversation, Effort
from orchestrator.http.bodies.forms import TextFormat, check_form
from orchestrator.http.bodies.tools import MAX_TOOLS, FunctionDefinition, Tool, ToolChoice, check_choice, read_choice

MAX_METADATA = 16
"""OpenAI's."""


class ResponseFunction(FunctionDefinition):
    """A function that the model may call, as responses write it: not nested."""

    type: Literal["function"]

    @property
    def tool(self) -> Tool:
        """As chats write it."""
        return Tool(type="function", function=FunctionDefinition(**self.model_dump(exclude={"type"})))


def _read_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"type", "name"}:  # chats nest the name
        value = {"type": value["type"], "function": {"name": value["name"]}}
    return read_choice(value)


class ResponseText(Body):
    """How the text of a response looks."""

    format: TextFormat | None = None
    verbosity: Any = refused("ask the model for it")


class ResponseReasoning(Body):
    """How a model thinks."""

    effort: Effort | None = None
    """As reasoning_effort of chats."""
    summary: Any = ignored("the reasoning comes whole")
    generate_summary: Any = ignored("the reasoning comes whole")
    context: Any = refused("the model's chat template decides", "auto")
    mode: Any = refused("there is one", "standard")


class ResponseItem(Body):
    """A message, a call of a function, what the function gave, or what the model thought before, by ``type``."""

    is_sent_back: ClassVar[bool] = True

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    id: Any = ignored("nothing is stored")
    status: Any = ignored("items are complete")
    phase: Any = ignored("chat templates know none")
    summary: Any = ignored("templates want the reasoning itself")
    encrypted_content: Any = refused("nothing is encrypted here; send content")
    parsed_arguments: Any = ignored("OpenAI's client adds them to arguments that it has read")

    @model_validator(mode="after")
    def _has_its_fields(self) -> ResponseItem:
        wanted = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": () if self.content is None else ("content",),  # OpenAI's own may have but a summary
        }
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            if (getattr(self, name) is not None) is not (name in wanted[self.type]):
                raise wrong_field(
                    name, f"belongs to some types of items; {self.type} has {', '.join(wanted[self.type])}"
                )
        return self


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseBody(Conversation):
    """POST /v1/responses."""

    input: Annotated[list[ResponseItem], BeforeValidator(_items)] = Field(min_length=1, max_length=MAX_MESSAGES)
    """A text, or messages, calls and their outputs."""
    instructions: str | None = None
    """A system message before all others."""
    max_output_tokens: int | None = None
    """As many as fit where nothing is said."""
    text: ResponseText | None = None
    tools: list[ResponseFunction] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_read_choice)] = None
    reasoning: ResponseReasoning | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    """Comes back with the answer."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, max_length=MAX_METADATA
    )
    """The former gives each token's logprob; the latter nothing, since reasoning comes as it is."""

    stream_options: Any = ignored("chunks are never padded, and usage always comes")
    show_tokens: Any = refused("/v1/chat/completions shows them", False)
    background: Any = refused("answers come at once or as a stream", False)
    background_options: Any = refused("answers come at once or as a stream")
    previous_response_id: Any = refused("nothing is stored; send the whole conversation")
    conversation: Any = refused("nothing is stored; send the whole conversation")
    prompt: Any = refused("nothing is stored; send the whole conversation")
    context_management: Any = refused("a conversation is never cut")
    truncation: Any = refused("a conversation is never cut", "disabled")
    max_tool_calls: Any = refused("it is for tools that OpenAI runs")
    access_programs: Any = refused("there are none")
    image: Any = refused("only text is read")

    @property
    def has_logprobs(self) -> bool:
        """Whether tokens come with their logprobs."""
        return "message.output_text.logprobs" in (self.include or ())

    @model_validator(mode="after")
    def _fits_together(self) -> ResponseBody:
        if self.top_logprobs and not self.has_logprobs:
            raise wrong_field("top_logprobs", "goes with include: [message.output_text.logprobs] only")
        check_choice([function.tool for function in self.tools or ()], self.tool_choice)
        check_form(self.text.format if self.text is not None else None, self.structured_outputs)
        return self
