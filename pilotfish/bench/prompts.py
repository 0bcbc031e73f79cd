"""What to ask: prompt files, the prompts that come with the package, or random token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from pilotfish.errors import InvalidArgumentError, NotFoundError

_EXAMPLE = '{"id": 1, "category": "maths", "turns": ["What is 7 times 8?"]}'


@dataclass(frozen=True)
class Prompt:
    """One request's prompt."""

    category: str
    content: str | tuple[int, ...]
    """A text is asked as a user's turn in the model's chat template, token ids as they are."""


def shipped() -> list[Prompt]:
    """Our own prompts, six tasks in turn."""
    text = resources.files("pilotfish.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return parse(text, "prompts.jsonl")


def read(path: Path) -> list[Prompt]:
    """The prompts of a file of JSON lines.

    Raises:
        NotFoundError: it cannot be read.
        InvalidArgumentError: as :func:`parse` does.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path} is no text in UTF-8 (byte {error.start})") from error


def parse(text: str, source: str) -> list[Prompt]:
    """One prompt a line: the first of ``turns``, as a later one needs an answer that the file does not have.

    Raises:
        InvalidArgumentError: naming source and line of what is no prompt; or there is none.
    """
    lines = enumerate(text.splitlines(), start=1)
    prompts = [_prompt(line, f"{source}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise InvalidArgumentError(f"{source} has no prompts; a line is such as {_EXAMPLE}")
    return prompts


def synthetic(count: int, length: int, vocab_size: int, rng: np.random.Generator) -> list[Prompt]:
    """``count`` prompts of ``length`` random token ids below ``vocab_size``."""
    ids = rng.integers(vocab_size, size=(count, length))
    return [Prompt("synthetic", tuple(row)) for row in ids.tolist()]


def take(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """The first ``count``, from the start again where there are not so many; None takes each once."""
    return [prompts[index % len(prompts)] for index in range(len(prompts) if count is None else count)]


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: no JSON ({error}); a line is such as {_EXAMPLE}") from error
    turns = value.get("turns") if isinstance(value, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidArgumentError(f"{where}: `turns` must be a list of texts, at least one; such as {_EXAMPLE}")
    return Prompt(str(value.get("category", "")), turns[0])
