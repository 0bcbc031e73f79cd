"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from orchestrator.http.bodies.base import Body, refused, wrong_field
from orchestrator.http.bodies.chat import ChatMessage, check_end
from orchestrator.http.bodies.conversation import MAX_MESSAGES, MAX_VARIABLES
from orchestrator.http.bodies.tools import MAX_TOOLS, Tool


class TokenizeBody(Body):
    """POST /tokenize: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    """Of a prompt: with the model's special tokens around it, the default; a chat template writes its own."""
    add_generation_prompt: bool | None = None
    """Of messages: false leaves out the beginning of the assistant's answer."""
    continue_final_message: bool | None = None
    """Of messages: ends with the content of the last one."""
    return_token_strs: bool | None = None
    """Gives the text of each token, too."""
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=MAX_VARIABLES)
    chat_template: Any = refused("the model's own is used")

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeBody:
        if (self.prompt is None) is (self.messages is None):
            raise wrong_field("prompt", "or messages must be given, and not both")
        if self.messages is not None:
            check_end(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
