"""Which tokens a grammar lets follow: structured output, at every node of a proposal.

xgrammar (Dong et al., arXiv 2411.15100) compiles a grammar against a vocabulary and moves a matcher along tokens; what
a matcher allows next is a mask over the vocabulary. Here a matcher is brought behind a row's completion, led along each
node's path and back again.

Workers keep nothing about rows, and so no matcher belongs to one: those that stand behind some completion are a cache,
found by grammar and tokens, and made again from the tokens of the pages where none is found.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.slots import Bools
from pilotfish.steps import Grammar, GrammarKind, Ints
from pilotfish.token_bytes import TokenBytes
from pilotfish.tokenizer_hash import load_tokenizer

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

MAX_COMPILED = 256
"""Grammars that stay compiled; of tens of kilobytes to some megabytes each."""

MAX_MATCHERS = 512
"""Matchers that stand behind some completion; a row in flight needs one. Of a completion of 1000 tokens 350 KB."""

MAX_WHITESPACE = 40
"""Between the parts of a JSON text that a schema describes: enough to indent ten levels, and not for ever."""

_JSON = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
_CONTROLS = frozenset(range(0x20)) - frozenset(b"\n\r")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")

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

    def pop(self, key: Key) -> Value:
        return self._values.pop(key)

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)


class Grammars:
    """Grammars over one tokenizer's vocabulary.

    ``compile`` may be called from any thread, ``masks`` from one.

    Args:
        folder: with tokenizer.json.
        waits: whether ``masks`` waits for a grammar that is not compiled yet. A target must, to be exact; a drafter
            need not, and drafts what it likes until then.
    """

    def __init__(self, folder: Path, *, waits: bool) -> None:
        self._folder, self._waits = folder, waits
        self._lock = threading.Lock()
        self._compiled: _Recent[Grammar, Future[xgrammar.CompiledGrammar]] = _Recent(MAX_COMPILED)
        self._matchers: _Recent[tuple[Grammar, bytes], xgrammar.GrammarMatcher] = _Recent(MAX_MATCHERS)

    def compile(self, grammar: Grammar) -> None:
        """Compiles a grammar unless it is.

        Raises:
            InvalidArgumentError: it is none, and why.
            FailedPreconditionError: xgrammar is not installed.
        """
        self._find(grammar).result()

    def masks(self, grammar: Grammar, completion: Ints, paths: Sequence[Sequence[int]]) -> Bools | None:
        """Tokens that may follow each node; none behind a path that breaks the grammar, or has ended.

        Args:
            grammar: of the row.
            completion: its tokens so far, i32[n].
            paths: tokens that lead from there to each node.

        Returns:
            bool[nodes, tokens of the tokenizer]; None if the grammar is not compiled yet.
        """
        found = self._find(grammar)
        if not self._waits and not found.done():
            return None
        bits = np.zeros((len(paths), -(-self._vocab_size // 32)), np.int32)
        try:
            matcher = self._behind(grammar, found.result(), completion)
            if matcher is not None:
                for node, path in enumerate(paths):
                    self._fill(matcher, grammar, path, bits, node)
                # Only now: one that failed on its way stands nobody knows where.
                self._matchers.put((grammar, completion.tobytes()), matcher)
        except (RuntimeError, InvalidArgumentError, FailedPreconditionError) as error:
            # It harms the row alone: nothing may follow any of its nodes.
            log.warning("a %s grammar cannot be followed: %s", grammar.kind.name, error)
            bits[:] = 0
        masks = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size].view(np.bool_)
        masks &= self._json if grammar.kind in _JSON else self._unicode
        for node, path in enumerate(paths):
            if len(before := path or completion) and before[-1] in self._begin_surrogate:
                masks[node] &= ~self._end_surrogate
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
            matcher.fill_next_token_bitmask(bits, node)
        matcher.rollback(taken)

    def _accept(self, matcher: xgrammar.GrammarMatcher, grammar: Grammar, tokens: Sequence[int]) -> int:
        """Leads a matcher along tokens as far as they keep to the grammar; how many do."""
        for taken, token in enumerate(tokens):
            # xgrammar refuses these as well, and writes a line to stderr each time.
            is_known = token < self._vocab_size and (token not in self._bytes.special or token in grammar.end_token_ids)
            if matcher.is_terminated() or not is_known or not matcher.accept_token(token):
                return taken
        return len(tokens)

    def _find(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._threads.submit(self._compile, grammar)
                self._compiled.put(grammar, found)
            return found

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, grammar.text
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
                case GrammarKind.JSON_OBJECT:
                    anything = '{"type": "object"}'
                    return compiler.compile_json_schema(anything, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
                case GrammarKind.REGEX:
                    return compiler.compile_regex(text)
                case GrammarKind.EBNF:
                    return compiler.compile_grammar(text)
                case GrammarKind.STRUCTURAL_TAG:
                    return compiler.compile_structural_tag(text)
        except Exception as error:  # xgrammar has several classes of its own, and raises plain ones too
            name = grammar.kind.name.lower()
            raise InvalidArgumentError(f"{name} is no grammar that can be followed: {_reason(error)}", name) from None

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammars")

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(load_tokenizer(self._folder))

    @property
    def _vocab_size(self) -> int:
        return self._bytes.size

    @cached_property
    def _unicode(self) -> Bools:
        """Tokens without a surrogate, bool[tokens].

        xgrammar 0.2 takes the bytes that would encode one (0xED, then 0xA0 and up) for a character. They are none
        (RFC 3629, section 3): whoever decodes the text reads three replacement characters.
        """
        return np.array([_SURROGATE.search(text) is None for text in self._layout.decoded_vocab])

    @cached_property
    def _begin_surrogate(self) -> frozenset[int]:
        return frozenset(index for index, text in enumerate(self._layout.decoded_vocab) if text.endswith(b"\xed"))

    @cached_property
    def _end_surrogate(self) -> Bools:
        """Tokens that would make one of a 0xED before them, bool[tokens]."""
        return np.array([_SURROGATE.match(b"\xed" + text) is not None for text in self._layout.decoded_vocab])

    @cached_property
    def _json(self) -> Bools:
        """Tokens that may stand in JSON text, bool[tokens].

        It has control characters between its parts alone, and there spaces and ends of lines will do. xgrammar 0.2
        lets them into strings whose length a schema limits, where they are errors (RFC 8259, section 7).
        """
        return self._unicode & [_CONTROLS.isdisjoint(text) for text in self._layout.decoded_vocab]

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        return xgrammar.GrammarCompiler(self._layout, max_threads=1, cache_enabled=False)

    @cached_property
    def _layout(self) -> xgrammar.TokenizerInfo:
        """Made on first use: it takes a fifth of a second, and few deployments are ever asked for a grammar."""
        try:
            import xgrammar
        except ImportError as error:
            raise FailedPreconditionError(f"this worker has no xgrammar ({error}); pip install xgrammar") from error
        return xgrammar.TokenizerInfo(
            # What is no text never matches: special tokens, and ids that the tokenizer leaves out.
            [b"" if token in self._bytes.special else self._bytes.of(token) for token in range(self._vocab_size)],
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=[],  # each grammar names its own
        )


def _reason(error: Exception) -> str:
    """What xgrammar says, without the time and the place in its source."""
    text = " ".join(str(error).split())
    return text.split(": ", 1)[-1] if text.startswith("[") else text
