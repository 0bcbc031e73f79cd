"""How models write calls of tools, and the grammars that make them do so.

Two ways of writing are known, told apart by the model's chat template:

- Hermes, Qwen, SmolLM3: ``<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>``, any number, text before them
- Llama 3 and all others: ``{"name": "f", "parameters": {...}}`` and nothing else; several with ``;`` between them
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.http.tool_reading import CLOSE, OPEN, BareCalls, Reader, TaggedCalls


@dataclass(frozen=True)
class Function:
    """What may be called.

    Attributes:
        name: of the function.
        parameters: JSON Schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Writing:
    """How a model writes calls.

    Attributes:
        opening: what a call begins with.
        argument_name: key of the arguments.
        closing: what a call ends with.
        separator: between two calls.
    """

    opening: str
    argument_name: str
    closing: str
    separator: str

    @property
    def has_tags(self) -> bool:
        """Whether calls stand between tags, so that there may be text before them."""
        return bool(self.closing)

    def reader(self, names: Collection[str], several: bool = True) -> Reader:
        """For an answer that may call one of the functions, or several."""
        return (TaggedCalls if self.has_tags else BareCalls)(names, several)

    def only_calls(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """A format of xgrammar's structural tags: calls and nothing else, one or several."""
        return {
            "type": "tags_with_separator",
            "tags": self._tags(functions),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }

    def calls_in_text(self, functions: Sequence[Function], several: bool) -> dict[str, Any]:
        """A format of xgrammar's structural tags: text in which whatever begins like a call is one."""
        return {
            "type": "triggered_tags",
            "triggers": [self.opening + '{"name": "'],
            "tags": self._tags(functions),
            "stop_after_first": not (several and self.has_tags),
        }

    def _tags(self, functions: Sequence[Function]) -> list[dict[str, Any]]:
        return [
            {
                "type": "tag",
                "begin": f'{self.opening}{{"name": {json.dumps(function.name)}, "{self.argument_name}": ',
                "content": {"type": "json_schema", "json_schema": function.parameters, "max_whitespace_cnt": 1},
                "end": "}" + self.closing,
            }
            for function in functions
        ]


HERMES = Writing(f"{OPEN}\n", "arguments", f"\n{CLOSE}", separator="\n")
BARE = Writing("", "parameters", "", separator="; ")


def writing_of(template: str) -> Writing:
    """How a model with this chat template writes calls."""
    return HERMES if OPEN in template else BARE
