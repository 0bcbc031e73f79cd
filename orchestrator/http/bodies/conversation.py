"""What the bodies of chats and of responses share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from orchestrator.admission import MAX_TOP_LOGPROBS
from orchestrator.http.bodies.base import ignored, refused, wrong
from orchestrator.http.bodies.sampling import Sampling
from pilotfish.errors import shown

MAX_MESSAGES = 4096
"""Most messages, calls and outputs of a conversation."""
MAX_VARIABLES = 256
"""Most variables of a chat template."""


def _content(value: Any) -> Any:
    """A text, or a list of text parts as the text that they make."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("it must be a text or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "reasoning_text"):
            raise wrong(f"its part {index} has type {shown(kind)}; only text is read")
        if not isinstance(part.get("text"), str):
            raise wrong(f"its part {index} has no text")
        texts.append(part["text"])
    return "".join(texts)


Content = Annotated[str | None, BeforeValidator(_content)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Conversation(Sampling):
    """A conversation that the model answers, maybe with calls of tools."""

    parallel_tool_calls: bool | None = None
    """False allows one call at most."""
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=MAX_VARIABLES)
    """Further variables of the model's chat template, as ``enable_thinking``; none that it does not read."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """The likeliest alternatives of each token, so many; goes with logprobs in a chat, with include in a response."""

    store: Any = ignored("nothing is stored")
    service_tier: Any = ignored("there is one; priority orders requests")
    safety_identifier: Any = ignored("nothing is kept per user")
    prompt_cache_key: Any = ignored("every prefix is cached")
    prompt_cache_options: Any = ignored("every prefix is cached")
    prompt_cache_retention: Any = ignored("every prefix is cached")
    moderation: Any = refused("nothing is moderated")
