"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from orchestrator.http.bodies.base import Body, ignored, refused, wrong_field
from orchestrator.http.bodies.classic import Classic
from orchestrator.http.bodies.conversation import MAX_MESSAGES, Content, Conversation, Effort
from orchestrator.http.bodies.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice, check_choice, read_choice


class ChatMessage(Body):
    """One message of a conversation."""

    is_sent_back: ClassVar[bool] = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought before; for templates that have a place for it."""
    reasoning: str | None = None
    """vLLM's newer name of reasoning_content."""
    parsed: Any = ignored("OpenAI's client adds it to content that it has read")
    refusal: Any = ignored("models here do not refuse apart from their text")
    audio: Any = refused("only text is read")
    annotations: Any = ignored("models here cite nothing")
    function_call: Any = refused("use tool_calls")

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise wrong_field("content", "is missing; only an assistant that calls tools may have none")
        if self.tool_calls and self.role != "assistant":
            raise wrong_field("tool_calls", "belongs to messages of the assistant")
        if (self.tool_call_id is not None) is not (self.role == "tool"):
            raise wrong_field("tool_call_id", "belongs to messages of role tool, and to each of them")
        if self.reasoning_content is not None and self.reasoning is not None:
            raise wrong_field("reasoning", "and reasoning_content are the same; give one of them")
        if self.thought is not None and self.role != "assistant":
            raise wrong_field("reasoning_content", "belongs to messages of the assistant")
        return self

    @property
    def thought(self) -> str | None:
        """The reasoning, by whichever name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


def check_end(messages: list[ChatMessage], adds_prompt: bool | None, continues: bool | None) -> None:
    """Returns if the conversation can end as it is to; raises for validators."""
    if continues and adds_prompt:
        raise wrong_field("continue_final_message", "goes with add_generation_prompt: false only")
    if continues and (messages[-1].content is None or messages[-1].tool_calls):
        raise wrong_field("continue_final_message", "needs a last message with content, and without tool_calls")


class ChatBody(Classic, Conversation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    """As many as fit where nothing is said."""
    max_tokens: int | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Gives each token's logprob."""
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(read_choice)] = None
    """auto where there are tools; required and a named function force a call of that form."""
    reasoning_effort: Effort | None = None
    """How long to think, where the model's chat template has a variable of this name."""
    include_reasoning: bool | None = None
    """False leaves out the reasoning that the server tells apart."""
    add_generation_prompt: bool | None = None
    """False leaves out the beginning of the assistant's answer."""
    continue_final_message: bool | None = None
    """The model goes on with the last message instead of answering it."""
    chat_template: Any = refused("the model's own is used")

    metadata: Any = ignored("nothing is stored")
    prediction: Any = ignored("a hint for speed; the draft predicts")
    audio: Any = refused("only text is generated")
    modalities: Any = refused("only text is generated", ["text"])
    functions: Any = refused("use tools", [])
    function_call: Any = refused("use tool_choice")
    verbosity: Any = refused("ask the model for it")
    web_search_options: Any = refused("nothing is searched")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "goes with logprobs: true only")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise wrong_field("max_tokens", "and max_completion_tokens differ; give one of them")
        check_choice(self.tools or [], self.tool_choice)
        check_end(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self
