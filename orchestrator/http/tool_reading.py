"""Calls of tools told apart from text, in an answer that comes in pieces.

Calls that are forced (``tool_choice`` required or by name) are written under a grammar, so that their arguments can be
streamed as they come. Where the model may call or not, a call is told apart from text only once it is complete and
names one of the tools; everything else stays text, as it was written. Tags count outside of JSON's strings alone: a
call may well write about them.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENT_NAMES = ("arguments", "parameters")
_PIECE = 256  # characters
_OUTSIDE_STRINGS = frozenset(" \t\r\n{}[]:,+-.0123456789Eeaflnrstu")  # of JSON; "<" is none of them
_BARE_BEGINNING = re.compile(r"\s*(?:\[\s*)?(?:\{|$)")
_BEGINNING = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:' + "|".join(_ARGUMENT_NAMES) + r')"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning before text and calls."""

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


Part = Words | Thought | CallBegins | Arguments


class Reader(ABC):
    """Tells calls from text in an answer that comes in pieces."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far is reasoning, and no part of the answer; see ``ReasoningReader``."""
        return False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return 0

    def read(self, texts: Sequence[str]) -> Iterator[Part]:
        """What became certain with more tokens, of these texts."""
        yield from self.push("".join(texts))

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
        self._end: ObjectEnd | None = None  # None between calls

    def push(self, text: str) -> Iterator[Part]:
        """Each name once it is complete, then the arguments."""
        while text:
            if self._end is None:
                self._between += text
                if (match := _BEGINNING.search(self._between)) is None:
                    return
                yield _call(json.loads(match[1]))
                text, self._between, self._end = self._between[match.end() :], "", ObjectEnd()
            arguments = self._end.take(text)
            if arguments:
                yield Arguments(arguments)
            text = text[len(arguments) :]
            if self._end.is_over:
                self._end = None


class ObjectEnd:
    """Finds the end of a JSON object that comes in pieces and starts with its first brace.

    Attributes:
        is_over: the object is complete.
        is_broken: something came that no JSON has in its place.
    """

    def __init__(self) -> None:
        self.is_over = self.is_broken = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def take(self, text: str) -> str:
        """As much of the text as belongs to the object; all of it once that is broken."""
        for index, character in enumerate(text):
            if self.is_over:
                return text[:index]
            if self.is_broken:
                break
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
        elif character not in _OUTSIDE_STRINGS:
            self.is_broken = True


class _Candidate:
    """What follows an opening tag, while it could be a call.

    Attributes:
        seen: all of it.
        json: the object, once that is complete.
        rest: what stands behind the call, once it is one.
        is_call: whether it is; None while that is open.
    """

    def __init__(self) -> None:
        self.seen = self.json = self.rest = ""
        self.is_call: bool | None = None
        self._end, self._after = ObjectEnd(), ""

    def push(self, text: str) -> None:
        """Takes more of it."""
        begin = text if self.json else text.lstrip()
        self.seen += text
        if not self.json and begin and not begin.startswith("{"):
            self.is_call = False
            return
        taken = self._end.take(begin)
        self.json += taken
        self._after += begin[len(taken) :]
        if self._end.is_broken:
            self.is_call = False
        elif after := self._after.lstrip():
            if after.startswith((CLOSE, OPEN)):  # some models forget to close
                self.is_call, self.rest = True, after.removeprefix(CLOSE)
            elif not CLOSE.startswith(after) and not OPEN.startswith(after):
                self.is_call = False

    def finish(self) -> None:
        """No more comes: a whole object will do."""
        self.is_call = self._end.is_over


class TaggedCalls(Reader):
    """Text, and calls in tags; white space around calls is no text.

    Args:
        names: of the functions that may be called.
        several: calls after the first one count too; else they are left out.
    """

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._held = ""  # what could be white space before a call, or the beginning of a tag
        self._call: _Candidate | None = None
        self._has_called = False

    def push(self, text: str) -> Iterator[Part]:
        """Text at once, but for what is held; calls when they are complete."""
        pieces = _pieces(text)
        while pieces:
            piece = pieces.pop()
            if self._call is None:
                self._held, tag, piece = (self._held + piece).partition(OPEN)
                yield from self._release(len(self._held[: None if tag else self._open_tag()].rstrip()))
                if not tag:
                    continue
                self._call = _Candidate()
            self._call.push(piece)
            if self._call.is_call is not None:
                pieces += _pieces((yield from self._close(self._call)))

    def finish(self) -> Iterator[Part]:
        """What was held back; an answer may end without the last closing tag."""
        while self._call is not None:
            self._call.finish()
            rest = yield from self._close(self._call)
            yield from self.push(rest)
        if not self._has_called or self._held.strip():
            yield from self._release(len(self._held))

    def _close(self, found: _Candidate) -> Generator[Part, None, str]:
        """The call, or the tag as text; returns what is to be read behind it."""
        self._call = None
        parts = _parse(found.json, self._names) if found.is_call else None
        if parts is None:
            self._held += OPEN
            yield from self._release(len(self._held))
            return found.seen
        if self._several or not self._has_called:
            yield from parts
        self._held, self._has_called = "", True
        return found.rest

    def _release(self, length: int) -> Iterator[Part]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            yield Words(text)

    def _open_tag(self) -> int:
        """Where a tag could begin that is not complete, else the end."""
        lengths = range(min(len(OPEN) - 1, len(self._held)), 0, -1)
        found = next((length for length in lengths if self._held.endswith(OPEN[:length])), 0)
        return len(self._held) - found


class BareCalls(Reader):
    """Text, or calls and nothing else: objects one after the other, or a list of them.

    Args:
        names: of the functions that may be called.
        several: calls after the first one count too; else they are left out.
    """

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._held: str | None = ""  # while it could be calls

    def push(self, text: str) -> Iterator[Part]:
        """Text at once if it does not start like a call."""
        if self._held is None:
            yield from Text().push(text)
            return
        self._held += text
        if not _BARE_BEGINNING.match(self._held):
            text, self._held = self._held, None
            yield Words(text)

    def finish(self) -> Iterator[Part]:
        """The calls, or what only looked like some."""
        if not self._held:
            return
        calls = [_parse(text, self._names) for text in _objects(self._held)]
        if not calls or None in calls:
            yield Words(self._held)
            return
        for call in calls if self._several else calls[:1]:
            yield from call or ()


def _pieces(text: str) -> list[str]:
    """A text in pieces, the last first; small, since what is behind a tag is copied for each that is found."""
    return [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)][::-1]


def _objects(text: str) -> list[str]:
    """The JSON objects that a text consists of; none if it has anything else but what separates them."""
    found, text = [], text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    while text := text.lstrip(" \t\r\n,;"):
        end = ObjectEnd()
        found.append(end.take(text) if text.startswith("{") else "")
        if not end.is_over:
            return []
        text = text[len(found[-1]) :]
    return found


def _parse(text: str, names: Collection[str]) -> list[Part] | None:
    """The call that a text is; None if it is none of a known function."""
    call = _load(text)
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments: Any = next((call[key] for key in _ARGUMENT_NAMES if key in call), None)
    if isinstance(arguments, str):  # as OpenAI's API gives them, and so some models write them
        arguments = _load(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return None
    return [_call(call["name"]), Arguments(_dump(arguments))]


def _load(text: str) -> Any:
    """The value of a JSON text, ends of lines in its strings allowed; a text that is none for one that is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _dump(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # escapes for half of a surrogate pair
        return json.dumps(arguments)
    return text


def _call(name: str) -> CallBegins:
    return CallBegins(f"call_{secrets.token_hex(12)}", name)
