"""Which tokens a grammar lets follow: structured output, at every node of a proposal.

xgrammar (Dong et al., arXiv 2411.15100) compiles a grammar against a vocabulary and moves a matcher along tokens; what
a matcher allows next is a mask over the vocabulary. Here a matcher is brought behind a row's completion, led along each
node's path and back again.

Workers keep nothing about rows, and so no matcher belongs to one: those that stand behind some completion are a cache,
found by grammar and tokens, and made again from the tokens of the pages where none is found.

Grammars are compiled beside the steps, each in a process of its own (grammar_process.py), and found by their text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from pilotfish.errors import (
    InvalidArgumentError,
    OverloadedError,
    PilotfishError,
    UnavailableError,
)
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.grammar_process import Compilation
from pilotfish.runtime.slots import Bools
from pilotfish.runtime.vocabulary import Vocabulary
from pilotfish.steps import Grammar, GrammarKind, Ints

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

MAX_COMPILED = 256
"""Grammars that stay compiled; of tens of kilobytes to some megabytes each."""

MAX_MATCHERS = 512
"""Matchers that stand behind some completion; a row in flight needs one. Of a completion of 1000 tokens 350 KB."""

FAIR_S = 1.0
"""How long a grammar may be compiled, by the clock, while others wait for its place."""

LATE = 4
"""How much longer than the limit of a token's mask a mask may take once text is written: the next ends the row."""

DEFAULT_LIMITS = GrammarLimits()

Key = TypeVar("Key")
Value = TypeVar("Value")


class _Recent(Generic[Key, Value]):
    """The values used last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        """From the one used longest ago."""
        return iter(list(self._values.items()))

    def pop(self, key: Key) -> Value:
        return self._values.pop(key)

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)


class _Job:
    """A grammar that is compiled, or will be.

    Attributes:
        compilation: on its way.
        found: what comes of it.
        waiting: how many wait for it and may leave.
        is_kept: whether it goes on though all of them leave.
    """

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.found: Future[xgrammar.CompiledGrammar] = Future()
        self.waiting = 0
        self.is_kept = False

    @property
    def size(self) -> int:
        """Bytes of the compiled grammar; 0 before there is one."""
        if not self.found.done() or self.found.exception() is not None:
            return 0
        return int(self.found.result().memory_size_bytes)


class Grammars:
    """Grammars over one tokenizer's vocabulary.

    ``compile`` may be called from any thread, ``masks`` from one.

    Args:
        folder: with tokenizer.json.
        waits: whether ``masks`` waits for a grammar that is not compiled yet. A target must, to be exact; a drafter
            need not, and drafts what it likes until then.
        limits: of grammars. Where more than ``at_once`` are to be compiled, the one that has taken longest gives way
            once it has taken ``FAIR_S``.
    """

    def __init__(self, folder: Path, *, waits: bool, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
        self._waits, self._limits = waits, limits
        self._vocabulary = Vocabulary(folder)
        self._lock = threading.Lock()
        self._jobs: _Recent[Grammar, _Job] = _Recent(MAX_COMPILED)
        self._queued: list[_Job] = []
        self._running: list[_Job] = []  # the one that began first comes first
        self._matchers: _Recent[tuple[Grammar, bytes], xgrammar.GrammarMatcher] = _Recent(MAX_MATCHERS)
        self._dropped: deque[Grammar] = deque()  # whose matchers are of no more use

    def compile(self, grammar: Grammar) -> Future[None]:
        """Has a grammar compiled unless it is; done when that is over.

        Where all who wait for a grammar have cancelled, compiling it ends.

        Raises:
            InvalidArgumentError: by the future: it is none, and why, or is past a limit.
            OverloadedError: by the future: too many are asked for at once.
            UnavailableError: by the future: its process died.
            FailedPreconditionError: by the future: xgrammar is not installed.
        """
        waiter: Future[None] = Future()
        with self._lock:
            job = self._find(grammar)
            job.waiting += 1

        def leave(waiter: Future[None]) -> None:
            if waiter.cancelled():
                self._leave(grammar, job)

        def tell(found: Future[xgrammar.CompiledGrammar]) -> None:
            if waiter.set_running_or_notify_cancel():
                error = found.exception()
                waiter.set_exception(error) if error is not None else waiter.set_result(None)

        waiter.add_done_callback(leave)
        job.found.add_done_callback(tell)
        return waiter

    def masks(self, grammar: Grammar, completion: Ints, paths: Sequence[Sequence[int]]) -> Bools | None:
        """Tokens that may follow each node; none behind a path that breaks the grammar, or has ended.

        Args:
            grammar: of the row.
            completion: its tokens so far, i32[n].
            paths: tokens that lead from there to each node.

        Returns:
            bool[nodes, tokens of the tokenizer]; None if the grammar is not compiled yet.
        """
        with self._lock:
            job = self._find(grammar)
            job.is_kept = True
        if not self._waits and not job.found.done():
            return None
        self._forget_dropped()
        vocabulary = self._vocabulary
        bits = np.zeros((len(paths), -(-vocabulary.size // 32)), np.int32)
        try:
            matcher = self._behind(grammar, job.found.result(), completion)
            if matcher is not None:
                for node, path in enumerate(paths):
                    self._fill(matcher, grammar, path, bits, node)
                # Only now: one that failed on its way stands nobody knows where.
                self._matchers.put((grammar, completion.tobytes()), matcher)
        except (RuntimeError, PilotfishError) as error:
            # It harms the row alone: nothing may follow any of its nodes.
            log.warning("a %s grammar cannot be followed: %s", grammar.kind.name, error)
            bits[:] = 0
        masks = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : vocabulary.size].view(np.bool_)
        masks &= vocabulary.json if _is_json(grammar) else vocabulary.unicode
        for node, path in enumerate(paths):
            if len(before := path or completion) and (bad := vocabulary.goes_on_badly.get(before[-1])) is not None:
                masks[node] &= ~bad
        return masks

    def _behind(
        self, grammar: Grammar, compiled: xgrammar.CompiledGrammar, completion: Ints
    ) -> xgrammar.GrammarMatcher | None:
        """A matcher that stands behind a completion, no longer in the cache; None if that breaks the grammar.

        It was brought there from the longest beginning that one stood behind, and is to be put back. A row that
        goes on otherwise from the same beginning finds none left, and gets one of its own from the start: a copy
        would cost as much, since matchers remember all the way that they came.
        """
        import xgrammar

        tokens, size, known = completion.tobytes(), completion.itemsize, len(completion)
        while known and (grammar, tokens[: known * size]) not in self._matchers:
            known -= 1
        matcher = self._matchers.pop((grammar, tokens[: known * size])) if known else None
        if matcher is None:
            matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(grammar.end_token_ids))
        taken = self._accept(matcher, grammar, completion[known:].tolist())
        if known + taken < len(completion):
            matcher.rollback(taken)
            self._matchers.put((grammar, tokens[: known * size]), matcher)
            return None
        return matcher

    def _fill(
        self, matcher: xgrammar.GrammarMatcher, grammar: Grammar, path: Sequence[int], bits: Ints, node: int
    ) -> None:
        """Leads a matcher along a path, fills the node's bits unless the path breaks the grammar, and leads it back."""
        taken = self._accept(matcher, grammar, path)
        if taken == len(path) and not matcher.is_terminated():
            with self._in_time(grammar):
                matcher.fill_next_token_bitmask(bits, node)
        matcher.rollback(taken)

    def _accept(self, matcher: xgrammar.GrammarMatcher, grammar: Grammar, tokens: Sequence[int]) -> int:
        """Leads a matcher along tokens as far as they keep to the grammar; how many do."""
        textless, size = self._vocabulary.textless, self._vocabulary.size
        for taken, token in enumerate(tokens):
            # xgrammar refuses these as well, and writes a line to stderr each time.
            is_known = token < size and (token not in textless or token in grammar.end_token_ids)
            if matcher.is_terminated() or not is_known:
                return taken
            with self._in_time(grammar):
                is_accepted = matcher.accept_token(token)
            if not is_accepted:
                return taken
        return len(tokens)

    @contextmanager
    def _in_time(self, grammar: Grammar) -> Iterator[None]:
        """Gives a grammar up over which a matcher takes so long that every row of the step waits."""
        started = time.thread_time()
        yield
        took_ms, limit_ms = (time.thread_time() - started) * 1000, LATE * self._limits.token_ms
        if took_ms > limit_ms:
            name = grammar.kind.name.lower()
            reason = f"{name} took {took_ms:.0f} ms for one token; at most {limit_ms:g} ms are allowed; make it simpler"
            failed = _Job(Compilation(self._vocabulary, grammar, self._limits))
            failed.found.set_exception(error := InvalidArgumentError(reason, name))
            with self._lock:
                self._jobs.put(grammar, failed)
            self._dropped.append(grammar)
            raise error

    def _forget_dropped(self) -> None:
        while self._dropped:
            dropped = self._dropped.popleft()
            for key, _ in self._matchers:
                if key[0] == dropped:
                    self._matchers.pop(key)

    # Compiling. Called with the lock where the name says so, else without.

    def _find(self, grammar: Grammar) -> _Job:
        """The grammar's job, begun unless it was; with the lock."""
        job = self._jobs.get(grammar)
        if job is None:
            job = _Job(Compilation(self._vocabulary, grammar, self._limits))
            self._jobs.put(grammar, job)
            self._queued.append(job)
            self._places.submit(self._run, grammar, job)
        return job

    def _leave(self, grammar: Grammar, job: _Job) -> None:
        with self._lock:
            job.waiting -= 1
            if job.waiting or job.is_kept or job.found.done():
                return
            self._forget(grammar, job)
        job.compilation.end()

    def _forget(self, grammar: Grammar, job: _Job) -> None:
        """With the lock."""
        if self._jobs.get(grammar) is job:
            self._jobs.pop(grammar)

    def _run(self, grammar: Grammar, job: _Job) -> None:
        with self._lock:
            self._queued.remove(job)
            self._running.append(job)
        try:
            outcome: xgrammar.CompiledGrammar | Exception = job.compilation.run(
                lambda took_s: self._has_turn(job, took_s)
            )
        except Exception as error:
            outcome = error
        with self._lock:
            self._running.remove(job)
            if isinstance(outcome, OverloadedError | UnavailableError):
                self._forget(grammar, job)  # it may be compiled yet
        if isinstance(outcome, Exception):
            job.found.set_exception(outcome)
        else:
            job.found.set_result(outcome)
            self._make_room()

    def _has_turn(self, job: _Job, took_s: float) -> bool:
        """Whether a job that has taken so long may go on."""
        with self._lock:
            is_awaited = job.is_kept and self._waits  # by a step, and so by every row
            return is_awaited or took_s < FAIR_S or not self._queued or self._running[0] is not job

    def _make_room(self) -> None:
        """Drops those used longest ago until the rest fits; never the last one."""
        with self._lock:
            jobs = list(self._jobs)
            total = sum(job.size for _, job in jobs)
            for grammar, job in jobs[:-1]:
                if total <= self._limits.cache_mib << 20:
                    return
                if job.size:
                    total -= job.size
                    self._jobs.pop(grammar)
                    self._dropped.append(grammar)

    @cached_property
    def _places(self) -> ThreadPoolExecutor:
        """Each thread waits for one process."""
        return ThreadPoolExecutor(self._limits.at_once, "grammars")


def _is_json(grammar: Grammar) -> bool:
    """Whether control characters are kept out of the text."""
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        return "minLength" in grammar.text or "maxLength" in grammar.text  # where xgrammar lets them into strings
    return grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
