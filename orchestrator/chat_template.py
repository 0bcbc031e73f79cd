"""Chat templates: a conversation as the text that a model was trained on.

A template is Jinja text that comes with the checkpoint and is not trusted: it runs in Jinja's
sandbox. What it may use is what Hugging Face documents for ``apply_chat_template``, so that the same
folder gives the same text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.errors import FailedPreconditionError, InvalidArgumentError

SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that templates know, as ``bos_token``."""

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        special_tokens: variables such as ``bos_token`` and their texts.

    Attributes:
        takes_tools: whether it tells the model of tools.
        variables: further ones that it reads, as ``enable_thinking``.

    Raises:
        FailedPreconditionError: if the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            read = meta.find_undeclared_variables(environment.parse(source))
            self.takes_tools = "tools" in read
            self.variables = frozenset(read) - _GIVEN - {f"{kind}_token" for kind in SPECIAL_NAMES}
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise FailedPreconditionError(
                f"the model's chat template is broken (line {error.lineno}: {error}); use a plain prompt"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text, special tokens written out.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: ends with the beginning of the assistant's answer.
            tools: that the model may call, as ``{"type": "function", "function": {"name": ...}}``.
            variables: further ones that the template knows.
            continue_final_message: ends with the content of the last message, so that more of it follows.

        Raises:
            InvalidArgumentError: if there is no message, or the template refuses them or hides the last one's content.
            FailedPreconditionError: if there are tools, and the template has no place for them.
        """
        if not messages:
            raise InvalidArgumentError("messages is empty; give at least one message", "messages")
        if tools and not self.takes_tools:
            raise FailedPreconditionError("tools: this model's chat template has no place for them", "tools")
        given = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if not continue_final_message:
            return self._render(given)
        mark, content = secrets.token_hex(8), given["messages"][-1]["content"]
        given["messages"][-1]["content"] = f"{content}{mark} "
        text, found, behind = self._render(given).rpartition(mark)
        if not found:
            message = "continue_final_message: this model's chat template does not write the last message's content"
            raise InvalidArgumentError(message, "continue_final_message")
        is_stripped = not behind.startswith(" ") and content.strip()  # by the template, at its end
        return text.removesuffix(content[len(content.rstrip()) :]) if is_stripped else text

    def _render(self, given: Mapping[str, Any]) -> str:
        try:
            return self._template.render(given)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidArgumentError(f"messages do not fit the model's chat template: {error}", "messages") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
