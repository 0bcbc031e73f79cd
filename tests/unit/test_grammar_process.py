"""Each grammar is compiled in a process of its own: what takes too much ends alone, and others have their turn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar
from rows import ints
from slow_grammars import SLOW_TEXT, is_gone, only_pid, pids
from tiny_models import EOS_ID, byte_tokenizer, write_tokenizer
from waiting import eventually

from pilotfish.errors import InvalidArgumentError, OverloadedError, UnavailableError
from pilotfish.runtime import grammar as module
from pilotfish.runtime import grammar_process
from pilotfish.runtime.grammar import Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.steps import Grammar, GrammarKind

LONG = GrammarLimits(timeout_s=600, memory_mib=4096)
SLOW = Grammar(GrammarKind.JSON_SCHEMA, SLOW_TEXT, (EOS_ID,))
Make = Callable[..., Grammars]


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, (EOS_ID,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_tokenizer())


@pytest.fixture
def make(folder: Path) -> Make:
    def make_grammars(limits: GrammarLimits = LONG, **changed: Any) -> Grammars:
        return Grammars(folder, waits=True, limits=replace(limits, **changed))

    return make_grammars


def stopped(grammars: Grammars) -> int:
    """The process that compiles now, made to take for ever."""
    os.kill(pid := only_pid(grammars), signal.SIGSTOP)
    return pid


def test_a_slow_grammar_holds_up_no_other(make: Make) -> None:
    grammars = make()
    slow = grammars.compile(SLOW)
    pid = stopped(grammars)
    for text in "abc":
        grammars.compile(regex(text)).result()
    assert not slow.done()
    assert pids(grammars) == [pid]
    slow.cancel()
    assert is_gone(pid)


def test_compiling_ends_when_the_last_one_leaves(make: Make) -> None:
    grammars = make()
    first, second = grammars.compile(SLOW), grammars.compile(SLOW)
    pid = stopped(grammars)
    first.cancel()
    assert pids(grammars) == [pid]
    assert not second.done()
    second.cancel()
    assert is_gone(pid)
    with pytest.raises(CancelledError):
        second.result()
    third = grammars.compile(SLOW)  # is compiled anew
    assert stopped(grammars) != pid
    third.cancel()


def test_one_who_leaves_before_there_is_a_process_leaves_none(make: Make) -> None:
    grammars = make(at_once=1)
    running = grammars.compile(SLOW)
    pid = stopped(grammars)
    waiting = grammars.compile(regex("never"))
    waiting.cancel()
    running.cancel()
    assert is_gone(pid)
    assert eventually(lambda: not grammars._running and not grammars._queued)
    grammars.compile(regex("a")).result()


@pytest.mark.parametrize(
    ("changed", "grammar", "message"),
    [
        ({"timeout_s": 0.2}, SLOW, "json_schema takes more than 0.2 s to compile, which is the limit"),
        ({"memory_mib": 24}, SLOW, "json_schema takes more than 24 MiB to compile, which is the limit"),
        (
            {"size_mib": 1},
            Grammar(
                GrammarKind.EBNF, "root ::= " + " | ".join(f'"{i:03}{"x" * 50}{i}"' for i in range(900)), (EOS_ID,)
            ),
            r"ebnf is of \d+ MiB when compiled; at most 1 MiB are allowed",
        ),
        ({"token_ms": 20}, regex("(([a-z]{1,100}){1,100}){1,100}"), r"regex takes \d+ ms to say .*; at most 20 ms"),
    ],
    ids=["time", "memory", "size", "masks"],
)
def test_what_is_past_a_limit_is_refused_by_name_and_stays_so(
    changed: dict[str, Any], grammar: Grammar, message: str, make: Make
) -> None:
    grammars = make(**changed)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=message) as refusal:
            grammars.compile(grammar).result()
        assert refusal.value.field == grammar.kind.name.lower()
    assert not pids(grammars)
    masks = grammars.masks(grammar, ints(), [[]])
    assert masks is not None
    assert not masks.any()
    grammars.compile(regex("a")).result()


def test_a_grammar_is_compiled_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = grammar_process.Compilation.run
    monkeypatch.setattr(module.Compilation, "run", lambda self, *rest: runs.append(self) or run(self, *rest))
    grammars = make()
    waiters = [grammars.compile(regex("[a-z]+")) for _ in range(8)]
    assert not wait(waiters, timeout=60).not_done
    grammars.compile(regex("[a-z]+")).result()
    assert grammars.masks(regex("[a-z]+"), ints(), [[]]) is not None
    assert len(runs) == 1


def test_where_too_many_are_compiled_the_one_that_took_longest_gives_way(make: Make) -> None:
    grammars = make(at_once=2)
    first = grammars.compile(SLOW)
    first_pid = stopped(grammars)
    second = grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, SLOW_TEXT + " ", (EOS_ID,)))
    assert eventually(lambda: len(pids(grammars)) == 2)
    os.kill(pids(grammars)[1], signal.SIGSTOP)
    grammars.compile(regex("a")).result()
    assert is_gone(first_pid)
    with pytest.raises(OverloadedError, match="too many grammars are compiled now, and this took"):
        first.result()
    assert not second.done()
    second.cancel()
    assert eventually(lambda: not pids(grammars))


def test_a_process_that_dies_fails_its_grammar_alone_and_for_now(make: Make) -> None:
    grammars = make()
    slow = grammars.compile(SLOW)
    os.kill(stopped(grammars), signal.SIGKILL)
    with pytest.raises(UnavailableError, match="the process that compiled the json_schema ended"):
        slow.result()
    again = grammars.compile(SLOW)
    assert only_pid(grammars)
    again.cancel()


def test_a_nursery_that_dies_is_started_again(make: Make) -> None:
    grammars = make()
    grammars.compile(regex("a")).result()
    process = grammar_process._nursery()._process
    assert process is not None
    process.kill()
    process.wait()
    grammars.compile(regex("ab")).result()


@pytest.mark.parametrize("quick_s", [0.0, 1e9], ids=["handed over", "compiled again"])
def test_masks_are_the_same_however_the_grammar_came(quick_s: float, folder: Path) -> None:
    """The child judges by its own clock; both ways are tried on the same schema."""
    from pilotfish.runtime.vocabulary import Vocabulary

    vocabulary = Vocabulary(folder)
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "maxLength": 3}', (EOS_ID,))
    compiled = grammar_process.compile_grammar(vocabulary.compiler, schema)
    if not quick_s:
        compiled = xgrammar.CompiledGrammar.deserialize_json(compiled.serialize_json(), vocabulary.layout)
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[EOS_ID])
    bits = np.zeros((1, -(-vocabulary.size // 32)), np.int32)
    matcher.fill_next_token_bitmask(bits, 0)
    (quote,) = byte_tokenizer().encode('"').ids
    assert np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist() == [quote]


def test_a_grammar_that_grows_slow_ends_its_row_alone(make: Make) -> None:
    """Along ambiguous rules a matcher takes longer with every token; nobody saw it on the way through the child."""
    grammars = make(token_ms=0.25)
    ambiguous = Grammar(GrammarKind.EBNF, 'root ::= root root root | root root | "a" | ""', (EOS_ID,))
    grammars.compile(ambiguous).exception()
    slow = Grammars(grammars._vocabulary.folder, waits=True, limits=LONG)
    slow.compile(ambiguous).result()
    slow._limits = grammars._limits
    (a,) = byte_tokenizer().encode("a").ids
    started = time.thread_time()
    masks = slow.masks(ambiguous, ints(*[a] * 2000), [[]])
    assert time.thread_time() - started < 30
    assert masks is not None
    assert not masks.any()
    with pytest.raises(InvalidArgumentError, match=r"ebnf took \d+ ms for one token; at most 1 ms are allowed"):
        slow.compile(ambiguous).result()
    slow._limits = LONG  # a busy machine takes its time over others
    slow.compile(regex("a")).result()
    found = slow.masks(regex("a"), ints(), [[]])
    assert found is not None
    assert found.any()


def test_compiled_grammars_make_room_for_others(make: Make) -> None:
    grammars = make(cache_mib=1)
    large = [
        Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(f'"{i:03}{letter * 50}{i}"' for i in range(400)), (EOS_ID,))
        for letter in "abcd"
    ]
    for grammar in large:
        grammars.compile(grammar).result()
        masks = grammars.masks(grammar, ints(), [[]])
        assert masks is not None
        assert masks.any()
    kept = [grammar for grammar in large if grammar in grammars._jobs]
    assert 1 <= len(kept) < len(large)
    assert kept == large[-len(kept) :]
    grammars.masks(large[-1], ints(), [[]])
    assert {key[0] for key, _ in grammars._matchers} <= set(kept)
