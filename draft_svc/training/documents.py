"""What a capture is to write: a numbered list of documents, the same whenever and however it is made.

Everything about a document follows from the seed and its number, so that a capture may stop anywhere and go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draft_svc.training.conversation import Message
from pilotfish.errors import InvalidArgumentError, NotFoundError

_EXAMPLE = '{"messages": [{"role": "user", "content": "What is 7 times 8?"}]}'
_ORDER, _CHOICES = 0, 1  # what random numbers are for


@dataclass(frozen=True, slots=True)
class Document:
    """One document to be written."""

    number: int
    messages: tuple[Message, ...] | None
    """Ends with the user's, which the target answers, or with a given answer; None: the target asks itself."""
    temperature: float
    """Of the answer; 1 for one that is given, which nobody took for its likelihood."""
    seed: int

    @property
    def is_answered(self) -> bool:
        return self.messages is not None and self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which documents there are, without end if the target asks itself.

    Attributes:
        conversations: of the prompt file.
        temperatures: a document takes one of these; one that stands there twice is taken twice as often.
        ask_itself: share of documents whose question the target writes too.
        seed: of order, choices and draws.
    """

    conversations: tuple[tuple[Message, ...], ...]
    temperatures: tuple[float, ...]
    ask_itself: float
    seed: int

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise InvalidArgumentError(f"temperatures is {list(self.temperatures)}; must be numbers of at least 0")
        if not 0 <= self.ask_itself <= 1:
            raise InvalidArgumentError(f"ask_itself is {self.ask_itself}; must be in [0, 1]")
        if not self.conversations and not self.ask_itself:
            raise InvalidArgumentError("there is nothing to answer; give --prompts, or --ask-itself above 0")

    def documents(self) -> Iterator[Document]:
        """All of them in order. Once the prompts are used up the target asks itself, or that is the end."""
        waiting = iter(np.random.default_rng((self.seed, _ORDER)).permutation(len(self.conversations)).tolist())
        choices = np.random.default_rng((self.seed, _CHOICES))
        number = 0
        while True:
            asks_itself = choices.random() < self.ask_itself
            temperature = float(choices.choice(self.temperatures))
            index = None if asks_itself else next(waiting, None)
            if index is None and not self.ask_itself:
                return
            messages = None if index is None else self.conversations[index]
            document = Document(number, messages, temperature, seed=(self.seed << 32) + number)
            yield replace(document, temperature=1.0) if document.is_answered else document
            number += 1


def read_conversations(path: Path) -> list[tuple[Message, ...]]:
    """The conversations of a file of JSON lines, one a line.

    A line is ``{"messages": [...]}`` as chat APIs take them, ending with a user's message or with an answer that is
    given; or ``{"turns": [...]}`` as in the prompt files of ``pilotfish bench``, of which the first is asked. Other
    keys are the file's own.

    Raises:
        NotFoundError: it cannot be read.
        InvalidArgumentError: naming file and line of what is no conversation; or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is no text in UTF-8 (byte {error.start})") from error
    lines = enumerate(text.split("\n"), start=1)
    found = [_conversation(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not found:
        raise InvalidArgumentError(f"{path} has no conversations; a line is such as {_EXAMPLE}")
    return found


def _conversation(line: str, where: str) -> tuple[Message, ...]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: no JSON ({error}); a line is such as {_EXAMPLE}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{where}: must be an object such as {_EXAMPLE}")
    turns = value.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return ({"role": "user", "content": turns[0]},)
    messages = value.get("messages")
    if not _are_messages(messages):
        raise InvalidArgumentError(f"{where}: `messages` must be a list of roles and contents, such as {_EXAMPLE}")
    assert isinstance(messages, list)
    if messages[-1]["role"] not in ("user", "assistant") or not any(each["role"] == "user" for each in messages):
        raise InvalidArgumentError(f"{where}: `messages` must have a user's, and end with a user's or an assistant's")
    return tuple(messages)


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(
            isinstance(each, dict)
            and each.keys() == {"role", "content"}
            and all(isinstance(text, str) for text in each.values())
            for each in value
        )
    )
