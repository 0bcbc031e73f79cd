"""Tokens on their way out: each leaves with its text, as soon as no stop text can take it back.

Text, ids and log probabilities end together: a stop text may begin in the middle of one token and end in the middle of
another, rounds later. So tokens wait as long as their text could belong to one, and those that do never leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import FinishReason, StopScanner
from orchestrator.core.requests import TokenLogprobs
from orchestrator.core.rounds import Run
from orchestrator.detokenizer import Detokenizer


class LeftToken(NamedTuple):
    """A token that a client gets, and the text that became final with it."""

    id: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None


class Left(NamedTuple):
    """Tokens that leave together, as ``LeftToken`` in columns; no logprobs where none were asked for."""

    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    texts: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class _Waiting:
    """A token, and which part of the completion's text depends on it.

    Attributes:
        begin: where in the completion's text its part begins.
        end: where the part ends, the whole character if it has only some bytes of one; None if that is not known yet.
        has_text: it is no end token.
    """

    token: LeftToken
    begin: int
    end: int | None
    has_text: bool


class Leaving:
    """The tokens of one completion.

    Args:
        detokenizer: fresh.
        stops: texts that end the completion; without any, every token leaves at once, and text that waits for the
            rest of a character comes with a later one.
        min_tokens: tokens that the completion has before a stop text can end it.
        named: names of the tokens without text that stop texts name, by id: part of the text that these are sought in,
            although none of it leaves.
        includes_stop: what ends the completion, a text or a token, is part of its text.

    Attributes:
        is_stopped: a stop text is complete; nothing leaves any more.
        dropped: tokens that were taken and will not leave.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        min_tokens: int = 0,
        named: Mapping[int, str] = MappingProxyType({}),
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer, self._scanner = detokenizer, StopScanner(stops, includes_stop)
        self._may_wait, self._min_tokens, self._named = bool(stops), min_tokens, named
        self._includes_stop = includes_stop
        self._waiting: list[_Waiting] = []
        self._taken = self._length = self._released = 0  # tokens; characters that there are, and that may leave
        self.dropped = 0

    @property
    def is_stopped(self) -> bool:
        return self._scanner.is_stopped

    def take(self, run: Run) -> tuple[Left, int]:
        """Takes what a round added.

        Returns:
            the tokens that leave, maybe of rounds before, and how many of the run were taken: all, but for those
            after the one that completes a stop text.
        """
        if not self._may_wait:
            return Left(run.token_ids, run.kinds, tuple(self._texts(run)), run.logprobs), len(run.token_ids)
        left, taken = self._take(run)
        return Left(
            token_ids=tuple([token.id for token in left]),
            kinds=tuple([token.kind for token in left]),
            texts=tuple([token.text for token in left]),
            logprobs=tuple([token.logprobs for token in left if token.logprobs is not None]),
        ), taken

    def _texts(self, run: Run) -> list[str]:
        """The text of each token, where none waits."""
        push = self._detokenizer.push
        if run.reason is FinishReason.STOP and not self._includes_stop:
            texts = [*map(push, run.token_ids[:-1]), ""]  # the end token has none
        else:
            texts = list(map(push, run.token_ids))
        if run.reason is not None:
            texts[-1] += self._detokenizer.finish()
        return texts

    def _take(self, run: Run) -> tuple[list[LeftToken], int]:
        """``take``, one token after the other."""
        logprobs: Sequence[TokenLogprobs | None] = run.logprobs or [None] * len(run.token_ids)
        end = len(run.token_ids) if run.reason is FinishReason.STOP else 0
        textless = 0 if self._includes_stop else end
        left: list[LeftToken] = []
        each = zip(run.token_ids, run.kinds, logprobs, strict=True)
        for count, (token_id, kind, logprob) in enumerate(each, start=1):
            text = "" if count == textless else self._detokenizer.push(token_id)
            self._wait(LeftToken(token_id, kind, text, logprob), has_text=count != end or bool(text))
            left += self._settled()
            if self.is_stopped:
                return left, count
        if run.reason is not None:
            left += self._finish()
        return left, len(run.token_ids)

    @property
    def _may_stop(self) -> bool:
        return self._taken > self._min_tokens

    def _wait(self, token: LeftToken, *, has_text: bool) -> None:
        self._taken += 1
        text = token.text or (self._named.get(token.id, "") if has_text else "")
        begin, self._length = self._length, self._length + len(text)
        if text:
            self._close()
        self._waiting.append(_Waiting(token, begin, None if self._detokenizer.is_open else self._length, has_text))
        self._released += len(self._scanner.push(text, may_stop=self._may_stop))

    def _finish(self) -> list[LeftToken]:
        """Lets go of all that waits, with the text of characters that have remained incomplete."""
        if rest := self._detokenizer.finish():
            owner = next(waiting for waiting in reversed(self._waiting) if waiting.has_text)
            owner.token = owner.token._replace(text=owner.token.text + rest)
            self._length += len(rest)
        self._close()
        self._released += len(self._scanner.push(rest, may_stop=self._may_stop))
        if not self.is_stopped:
            self._released += len(self._scanner.flush())
        return self._settled()

    def _close(self) -> None:
        """Text has come, and so the end of every part that was open."""
        for waiting in self._waiting:
            waiting.end = self._length if waiting.end is None else waiting.end

    def _settled(self) -> list[LeftToken]:
        """The tokens that leave now. Where a stop text begins inside a token, that leaves with the text before it."""
        count = 0
        for waiting in self._waiting:
            is_whole = waiting.end is not None and waiting.end <= self._released
            if not (is_whole or (self.is_stopped and waiting.begin < self._released)):
                break
            count += 1
        going, self._waiting = self._waiting[:count], self._waiting[count:]
        if self.is_stopped:
            self.dropped, self._waiting = len(self._waiting), []
        return [each.token._replace(text=each.token.text[: self._released - each.begin]) for each in going]
