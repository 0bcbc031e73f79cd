"""Calls of tools told apart from text, in an answer that comes in pieces.

Calls that are forced (``tool_choice`` required or by name) are written under a grammar, so that their arguments can be
streamed as they come. Where the model may call or not, a call is told apart from text only once it is complete and
names one of the tools; everything else stays text, as it was written.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENT_NAMES = ("arguments", "parameters")
_BEGINNING = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:' + "|".join(_ARGUMENT_NAMES) + r')"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a function; its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last: a piece of JSON."""

    json: str


Part = Words | CallBegins | Arguments


class Reader(ABC):
    """Tells calls from text in an answer that comes in pieces."""

    @abstractmethod
    def push(self, text: str) -> Iterator[Part]:
        """What became certain with more text."""

    def finish(self) -> Iterator[Part]:
        """What is certain once no more text comes."""
        return iter(())


class Text(Reader):
    """For answers that cannot call anything."""

    def push(self, text: str) -> Iterator[Part]:
        """The text itself."""
        if text:
            yield Words(text)


class ForcedCalls(Reader):
    """For calls under a grammar and nothing else: streams the arguments as they come."""

    def __init__(self) -> None:
        self._between = ""  # calls: up to the arguments of the next
        self._end: _ObjectEnd | None = None  # None between calls

    def push(self, text: str) -> Iterator[Part]:
        """Each name once it is complete, then the arguments."""
        while text:
            if self._end is None:
                self._between += text
                if (match := _BEGINNING.search(self._between)) is None:
                    return
                yield _call(json.loads(match[1]))
                text, self._between, self._end = self._between[match.end() :], "", _ObjectEnd()
            arguments = self._end.take(text)
            if arguments:
                yield Arguments(arguments)
            text = text[len(arguments) :]
            if self._end.is_over:
                self._end = None


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces and starts with its first brace."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def take(self, text: str) -> str:
        """As much of the text as belongs to the object."""
        for index, character in enumerate(text):
            if self.is_over:
                return text[:index]
            self._step(character)
        return text

    def _step(self, character: str) -> None:
        if self._in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_text = False
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0


class TaggedCalls(Reader):
    """Text, and calls in tags; white space around calls is no text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # what could be white space before a call, the beginning of a tag, or a call from its tag on
        self._has_called = False

    def push(self, text: str) -> Iterator[Part]:
        """Text at once, but for what is held; calls when they are complete."""
        self._held += text
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                yield from self._release(len(self._held[:start].rstrip()))
                return
            call, rest = self._held[start + len(OPEN) : end], self._held[end + len(CLOSE) :]
            if (parts := _parse(call, self._names)) is None:  # looks like one, and is text
                yield from self._release(end + len(CLOSE))
                continue
            yield from self._release(len(self._held[:start].rstrip()))
            yield from parts
            self._held, self._has_called = rest, True
        yield from self._release(len(self._held[: self._open_tag()].rstrip()))

    def finish(self) -> Iterator[Part]:
        """What was held back; an answer may end without the last closing tag."""
        before, tag, call = self._held.partition(OPEN)
        parts = _parse(call, self._names) if tag else None
        if parts is not None:
            yield from self._release(len(before.rstrip()))
            yield from parts
        elif not self._has_called or self._held.strip():
            yield from self._release(len(self._held))

    def _release(self, length: int) -> Iterator[Part]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            yield Words(text)

    def _open_tag(self) -> int:
        """Where a tag could begin that is not complete, else the end."""
        lengths = range(min(len(OPEN) - 1, len(self._held)), 0, -1)
        found = next((length for length in lengths if self._held.endswith(OPEN[:length])), 0)
        return len(self._held) - found


class BareCall(Reader):
    """Text, or one call and nothing else."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = ""  # while it could be a call

    def push(self, text: str) -> Iterator[Part]:
        """Text at once if it does not start like a call."""
        if self._held is None:
            yield from Text().push(text)
            return
        self._held += text
        if self._held.strip() and not self._held.lstrip().startswith("{"):
            text, self._held = self._held, None
            yield Words(text)

    def finish(self) -> Iterator[Part]:
        """The call, or what only looked like one."""
        if self._held:
            yield from _parse(self._held, self._names) or [Words(self._held)]


def _parse(text: str, names: Collection[str]) -> list[Part] | None:
    """The call that a text is; None if it is none of a known function."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments: Any = next((call[key] for key in _ARGUMENT_NAMES if key in call), {})
    if not isinstance(arguments, dict):
        return None
    return [_call(call["name"]), Arguments(json.dumps(arguments, ensure_ascii=False))]


def _call(name: str) -> CallBegins:
    return CallBegins(f"call_{secrets.token_hex(12)}", name)
