"""Reasoning told apart from the answer, in the ways that families of models mark it: ``--reasoning-parser``.

A model thinks first, between two marks, and answers then. Its chat template may have written the first mark already, or
an empty pair of them where it is not to think; so the end of the prompt says where an answer begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.http.conversation import Plan
from orchestrator.http.errors import invalid
from orchestrator.http.forms import Form, tag
from orchestrator.http.tool_reading import Part, Reader, Thought
from orchestrator.tokenizer import Tokenizer

_TAIL = 64  # tokens of a prompt, among which its last mark would be
_BLANK = {"type": "regex", "pattern": "[ \\n]{0,4}"}  # between reasoning and answer


@dataclass(frozen=True)
class Marks:
    """How a family of models marks its reasoning.

    Attributes:
        begins: texts that begin it.
        ends: texts that end it.
        always: an answer begins with reasoning even if neither it nor the prompt has a mark.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    always: bool = False


_THINK = Marks(("<think>",), ("</think>",))

PARSERS = {
    "deepseek_r1": replace(_THINK, always=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "granite": Marks(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": Marks(("[THINK]",), ("[/THINK]",)),
    "qwen3": _THINK,
    "seed_oss": Marks(("<seed:think>",), ("</seed:think>",)),
}
"""By the names that vLLM gives them."""


@dataclass(frozen=True)
class Reasoning:
    """What is known of an answer's reasoning before it comes.

    Attributes:
        marks: of the model.
        has_begun: the answer begins within reasoning, or behind it; None if the prompt does not say.
    """

    marks: Marks
    has_begun: bool | None

    def plan(self, how: Plan, tokenizer: Tokenizer) -> Plan:
        """The same plan with reasoning before it: a form of the answer begins behind that.

        Raises:
            ApiError: the marks are special tokens, which no form can have.
        """
        if self.has_begun is False:
            return how
        # A text that ends calls may stand in the reasoning, too; the reader leaves further calls out by itself.
        how = replace(how, stops=(), wrap=self._reader, marks=(*how.marks, *self.marks.begins, *self.marks.ends))
        if how.form is None or not how.form.part:  # a structural tag is the client's own, and of the whole answer
            return how
        if any(tokenizer.is_special(mark) for mark in (*self.marks.begins, *self.marks.ends)):
            message = f"{how.form.field} does not go with this model's reasoning, whose marks are special tokens"
            raise invalid(how.form.field, message, "unsupported_parameter")
        return replace(how, form=self._form(how.form))

    def _reader(self, inner: Reader) -> Reader:
        return ReasoningReader(inner, self.marks, self.has_begun is True or self.marks.always)

    def _form(self, form: Form) -> Form:
        begins = ("",) if self.has_begun or self.marks.always else self.marks.begins
        behind: list[dict[str, Any]] = [
            {"type": "sequence", "elements": [_thought(begin, self.marks.ends), _BLANK, form.part]} for begin in begins
        ]
        either = behind if "" in begins else [*behind, dict(form.part)]
        return tag(either[0] if len(either) == 1 else {"type": "or", "elements": either}, form.field)


def _thought(begin: str, ends: Sequence[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": list(ends)}


def reasoning_of(marks: Marks, tokenizer: Tokenizer, prompt: Sequence[int], continued: str | None = None) -> Reasoning:
    """What a prompt says of the reasoning behind it.

    Args:
        marks: of the model.
        tokenizer: of the model.
        prompt: token ids.
        continued: content of the message that the answer goes on with; None if it is a message of its own.
    """
    if continued:
        begin, end = (max(map(continued.rfind, some)) for some in (marks.begins, marks.ends))
        return Reasoning(marks, begin > end)
    text = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    return Reasoning(marks, True if text.endswith(marks.begins) else False if text.endswith(marks.ends) else None)


class ReasoningReader(Reader):
    """Reasoning first, without its marks and the white space around it; then the answer, as another reader tells it.

    Args:
        inner: reads the answer.
        marks: of the model.
        begins: the answer begins with reasoning; else that depends on its first mark.
    """

    def __init__(self, inner: Reader, marks: Marks, begins: bool) -> None:
        self._inner, self._marks, self._begins = inner, marks, begins
        self._held = ""
        self._step: Callable[[bool], Iterator[Part]] = self._open
        self._has_thought = False
        self._token_begins: list[int] = []  # where in the text each token begins, until the answer does
        self._length = self._reasoned = 0  # characters: of the text, and of it up to the reasoning's end

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far is reasoning, or white space behind it."""
        return self._step in (self._think, self._skip)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, marks included."""
        return bisect_left(self._token_begins, self._length if self._step == self._think else self._reasoned)

    def read(self, texts: Sequence[str]) -> Iterator[Part]:
        """What became certain with more tokens."""
        begin = self._length
        for text in texts if self._step != self._answer else ():
            self._token_begins.append(begin)
            begin += len(text)
        yield from self.push("".join(texts))

    def push(self, text: str) -> Iterator[Part]:
        """Reasoning and answer as they come, but for what could be a mark, or white space before one."""
        self._length += len(text)
        self._held += text
        yield from self._step(False)

    def finish(self) -> Iterator[Part]:
        """What was held back."""
        yield from self._step(True)
        yield from self._inner.finish()

    def _open(self, is_last: bool) -> Iterator[Part]:
        """Before it is certain whether the answer begins with reasoning."""
        text = self._held.lstrip()
        begin = next((begin for begin in self._marks.begins if text.startswith(begin)), "")
        if not begin and not is_last and any(begin.startswith(text) for begin in self._marks.begins):
            return
        self._held = text[len(begin) :] if begin else self._held
        self._step = self._think if begin or self._begins else self._answer
        yield from self._step(is_last)

    def _think(self, is_last: bool) -> Iterator[Part]:
        """Within the reasoning."""
        found = [(at, end) for end in self._marks.ends if (at := self._held.find(end)) >= 0]
        if not found:
            yield from self._release(len(self._held) if is_last else self._open_mark())
            return
        at, end = min(found)
        yield from self._release(len(self._held[:at].rstrip()))
        behind = self._held.partition(end)[2]
        self._reasoned = self._length - len(behind)
        self._held, self._step = behind, self._skip
        yield from self._step(is_last)

    def _skip(self, is_last: bool) -> Iterator[Part]:
        """Behind the reasoning, where white space is no part of the answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answer
            yield from self._step(is_last)

    def _answer(self, is_last: bool) -> Iterator[Part]:
        text, self._held = self._held, ""
        yield from self._inner.push(text)

    def _release(self, length: int) -> Iterator[Part]:
        text, self._held = self._held[:length], self._held[length:]
        if not self._has_thought:
            text = text.lstrip()
        if text:
            self._has_thought = True
            yield Thought(text)

    def _open_mark(self) -> int:
        """Where an end could begin that is not complete, with the white space before it; else the end."""
        longest = min(max(map(len, self._marks.ends)) - 1, len(self._held))
        open_ends = (n for n in range(longest, 0, -1) if any(e.startswith(self._held[-n:]) for e in self._marks.ends))
        return len(self._held[: len(self._held) - next(open_ends, 0)].rstrip())
