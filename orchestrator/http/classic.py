"""What the answers of /v1/completions and /v1/chat/completions have in common: choices, chunks, usage."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.core.finish import FinishReason
from orchestrator.http.bodies.classic import Classic
from orchestrator.http.calls import Writer
from orchestrator.http.rounds import round_of
from orchestrator.http.sse import DONE, event
from orchestrator.http.usage import UsageCount
from orchestrator.outputs import Event, Finished, Piece, Prompt
from orchestrator.tokenizer import Tokenizer

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ClassicWriter(Writer):
    """Writes chunks with choices, or the choices that these chunks add up to.

    Args:
        body: what was asked.
        tokenizer: of the model.
        prompts: token counts.
        prefix: of ids.
        kind: ``object`` of an answer in one piece.
        chunk_kind: ``object`` of a chunk.
    """

    def __init__(
        self, body: Classic, tokenizer: Tokenizer, prompts: Sequence[int], prefix: str, kind: str, chunk_kind: str
    ) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.streams = bool(body.stream)
        self.tokenizer = tokenizer
        self.samples = body.n or 1
        self.choice_count = self.samples * len(prompts)
        self._shows_rounds = bool(body.show_tokens)
        self._sends_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.usage = UsageCount(prompts)
        self._kind, self._chunk_kind = kind, chunk_kind
        self._head = {"created": int(time.time()), "model": body.model, "system_fingerprint": None}
        self._choices: dict[int, dict[str, Any]] = {}

    def begin(self) -> Iterator[bytes]:
        """The chunks that open the choices."""
        return map(self._chunk, self.openings())

    def push(self, prompt: int, found: Event) -> Iterator[bytes]:
        """A chunk for each delta."""
        return map(self._chunk, self._deltas(prompt, found))

    def end(self) -> Iterator[bytes]:
        """The usage, if it is wanted, and the end."""
        if self._sends_usage:
            yield self._chunk(None)
        yield DONE

    def add(self, prompt: int, found: Event) -> None:
        """Adds the deltas to their choices."""
        for delta in self._deltas(prompt, found):
            self.fold(self._choices, delta)

    def whole(self) -> dict[str, Any]:
        """All choices in order, and the usage."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {"id": self.id, "object": self._kind, **self._head, "choices": choices, "usage": self.usage.classic()}

    def openings(self) -> Iterator[dict[str, Any]]:
        """Deltas that open the choices of a stream."""
        return iter(())

    def echo(self, choice: int, prompt: Prompt) -> Iterator[dict[str, Any]]:
        """Deltas of a choice that begins with its prompt."""
        return iter(())

    @abstractmethod
    def piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Deltas of a choice for what one round added."""

    @abstractmethod
    def finish(self, choice: int, reason: str) -> Iterator[dict[str, Any]]:
        """The last deltas of a choice."""

    @staticmethod
    def extend(choice: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
        """Adds log probabilities, lists by name, to those that the choice has."""
        if logprobs is None:
            return
        known = choice["logprobs"] = choice["logprobs"] or {}
        for name, values in logprobs.items():
            known[name] = values if values is None else known.get(name, []) + values

    @abstractmethod
    def fold(self, choices: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
        """Adds a delta to the choice that it belongs to."""

    def _deltas(self, prompt: int, found: Event) -> Iterator[dict[str, Any]]:
        first = prompt * self.samples
        if isinstance(found, Prompt):
            for choice in range(first, first + self.samples):
                yield from self.echo(choice, found)
        elif isinstance(found, Finished):
            self.usage.add(prompt, found.usage)
            yield from self.finish(first + found.index, REASONS[found.reason])
        else:
            yield from self._piece(first + found.index, found)

    def _piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        deltas, extras = list(self.piece(choice, piece)), {}
        if piece.logprobs:
            extras["logprobs"] = self.logprobs(choice, piece)
        if self._shows_rounds:
            extras["round"] = round_of(piece, self.tokenizer)
        if extras:
            deltas = deltas or [self.nothing(choice)]
            deltas[0] |= extras
        yield from deltas

    @abstractmethod
    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any]:
        """Log probabilities of a piece that has them."""

    @abstractmethod
    def nothing(self, choice: int) -> dict[str, Any]:
        """A delta that adds nothing."""

    def _chunk(self, delta: dict[str, Any] | None) -> bytes:
        """One event; without a delta that of the usage."""
        usage = {} if not self._sends_usage else {"usage": None if delta is not None else self.usage.classic()}
        choices = [] if delta is None else [delta]
        return event({"id": self.id, "object": self._chunk_kind, **self._head, "choices": choices, **usage})
