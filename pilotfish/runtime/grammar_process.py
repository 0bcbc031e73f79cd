"""Grammars are compiled in processes of their own, with limits: a few bytes of text can ask for hours and gigabytes.

A nursery process, started with the first grammar, imports xgrammar and reads the vocabulary once (seconds), and then
forks for every grammar (milliseconds). Nothing but killing a process ends xgrammar's work before it is done, and no
other process shares its memory. The worker asks through a pair of sockets per grammar::

    worker                      nursery                     child of its own
    folder, grammar, limits --> reads the folder, forks --> its pid, then what came of it, and ends

What compiles in no time is compiled once more in the worker: that costs less than to write and read it (5 MB for a
vocabulary of 49,152 and a free string).
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.errors import InvalidArgumentError, OverloadedError, UnavailableError
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.vocabulary import Vocabulary
from pilotfish.steps import Grammar, GrammarKind

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 40
"""Between the parts of a JSON text that a schema describes: enough to indent ten levels, and not for ever."""

LOOK_S = 0.1
"""How often it is asked whether a grammar that takes long may go on."""

QUICK_S = 0.1
"""Processor seconds within which a grammar is compiled once more rather than handed over."""

PROBED_TOKENS = 64
"""How far a compiled grammar is followed, to see how long its masks take."""

NICENESS = 5
"""Compiling takes what the models leave: a third of a core that both want."""

PATIENCE = 10
"""Seconds of the clock for each processor second that a grammar may take, before its process counts as hung."""


class Compilation:
    """One grammar on its way through a process of its own; ``run`` it on one thread, ``end`` it from any.

    Args:
        vocabulary: that it is compiled for.
        grammar: what to compile.
        limits: that it keeps to.

    Attributes:
        pid: of the process, None before it and once it has answered.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, limits: GrammarLimits) -> None:
        self._vocabulary, self._grammar, self._limits = vocabulary, grammar, limits
        self._lock = threading.Lock()
        self._has_ended = False
        self.pid: int | None = None

    def run(self, has_turn: Callable[[float], bool] = lambda took_s: True) -> xgrammar.CompiledGrammar:
        """The compiled grammar.

        Args:
            has_turn: asked now and then, with the seconds that it took so far, whether it may go on.

        Raises:
            InvalidArgumentError: it is none, and why, or is past a limit.
            OverloadedError: it may not go on.
            UnavailableError: it was ended, or its process died.
            FailedPreconditionError: xgrammar is not installed.
        """
        layout, name = self._vocabulary.layout, self._grammar.kind.name.lower()
        try:
            if self._has_ended:
                raise EOFError("before it began")
            with _nursery().ask(self._vocabulary.folder) as job:
                reason, serialized = self._follow(job, has_turn)
        except (EOFError, OSError) as error:
            raise UnavailableError(f"the process that compiled the {name} ended ({error}); ask again") from None
        if reason is not None:
            raise InvalidArgumentError(f"{name} {reason}", name)
        if serialized is None:
            return compile_grammar(self._vocabulary.compiler, self._grammar)
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(serialized, layout)

    def end(self) -> None:
        """Has ``run`` raise, and kills the process if there is one."""
        self._has_ended = True
        self._kill()

    def _follow(self, job: Connection, has_turn: Callable[[float], bool]) -> tuple[str | None, str | None]:
        """What is wrong with the grammar, and the compiled one, both None if it is quick to compile."""
        job.send((self._grammar, self._limits))
        self.pid = job.recv()  # as long as it takes: the nursery may be reading the vocabulary
        started, limit_s = time.monotonic(), self._limits.timeout_s
        try:
            if self._has_ended:
                raise EOFError("before its time")
            while not job.poll(LOOK_S):
                took_s = time.monotonic() - started
                if not has_turn(took_s):
                    raise OverloadedError(
                        f"too many grammars are compiled now, and this took {took_s:.0f} s; ask again"
                    )
                if took_s > PATIENCE * limit_s:
                    raise TimeoutError
            reason, serialized = job.recv()
            with self._lock:
                self.pid = None  # it is gone: nothing is left to kill
        except (EOFError, ConnectionError, TimeoutError):
            # The kernel ends it at its limit, without a word.
            if self._has_ended or time.monotonic() - started < limit_s:
                raise
            return f"takes more than {limit_s:g} s to compile, which is the limit; make it simpler", None
        finally:
            self._kill()
        return reason, serialized

    def _kill(self) -> None:
        with self._lock:
            if self.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.pid = None


def compile_grammar(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """What xgrammar makes of a grammar; raises whatever xgrammar raises."""
    text = grammar.text
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


class _Nursery:
    """The process that forks for each grammar; started again where it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, folder: Path) -> Connection:
        """A connection to a child that knows the vocabulary of the folder, and takes a grammar and its limits."""
        ours, theirs = socket.socketpair()
        with theirs:
            job = Connection(ours.detach())
            job.send(folder)
            with self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return job

    def _start(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        # One thread: a child that forks off beside others may find their locks taken for ever.
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | one | {"TOKENIZERS_PARALLELISM": "false"},
            )

    def close(self) -> None:
        """Ends the process; those that it forked off live on for as long as they may."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_only: list[_Nursery] = []


def _nursery() -> _Nursery:
    """The one of this process: workers that share it, as in tests, share what it has imported."""
    with _lock:
        if not _only:
            _only.append(_Nursery())
            atexit.register(_only[0].close)
        return _only[0]


def serve(control: socket.socket) -> None:
    """The nursery: forks a child for each connection that comes, until the worker ends."""
    import xgrammar  # noqa: F401 - now, and not in every child

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt ends the worker, and that ends this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    vocabularies: dict[Path, Vocabulary] = {}
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with Connection(descriptors[0]) as job:
            folder = job.recv()
            vocabulary = vocabularies.setdefault(folder, Vocabulary(folder))
            assert vocabulary.compiler  # made now, and not in every child
            if os.fork() == 0:
                control.close()
                try:
                    _answer(job, vocabulary)
                finally:
                    os._exit(0)


def _answer(job: Connection, vocabulary: Vocabulary) -> None:
    grammar, limits = job.recv()
    _limit(limits)
    job.send(os.getpid())
    try:
        started = time.process_time()
        compiled = compile_grammar(vocabulary.compiler, grammar)
        took_s = time.process_time() - started
        reason = _too_large(compiled, limits) or _too_slow(compiled, grammar, limits, vocabulary)
        answer = (reason, None if reason or took_s < QUICK_S else compiled.serialize_json())
    except MemoryError:
        answer = (_no_memory(limits), None)
    except Exception as error:  # xgrammar has several classes of its own, and raises plain ones too
        is_memory = "bad_alloc" in str(error) or "bad allocation" in str(error)
        answer = (_no_memory(limits) if is_memory else f"is no grammar that can be followed: {_reason(error)}", None)
    job.send(answer)


def _limit(limits: GrammarLimits) -> None:
    """Has the kernel enforce the limits: neither a signal handler nor a thread would have its turn for sure."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _address_space() + (limits.memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.timeout_s)


def _address_space() -> int:
    """Bytes that this process has mapped, used or not; as Linux tells it."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _no_memory(limits: GrammarLimits) -> str:
    return f"takes more than {limits.memory_mib} MiB to compile, which is the limit; make it simpler"


def _too_large(compiled: xgrammar.CompiledGrammar, limits: GrammarLimits) -> str | None:
    size = compiled.memory_size_bytes / (1 << 20)
    if size <= limits.size_mib:
        return None
    return f"is of {size:.0f} MiB when compiled; at most {limits.size_mib} MiB are allowed; make it simpler"


def _too_slow(
    compiled: xgrammar.CompiledGrammar, grammar: Grammar, limits: GrammarLimits, vocabulary: Vocabulary
) -> str | None:
    """Follows the grammar along tokens as they come, with the clock in hand."""
    import numpy as np
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(grammar.end_token_ids))
    bits, dice = np.zeros((1, -(-vocabulary.size // 32)), np.int32), np.random.default_rng(0)

    def taken_ms(call: Callable[[], object]) -> float:
        started = time.process_time()
        call()
        return (time.process_time() - started) * 1000

    for _ in range(PROBED_TOKENS):
        took_ms = taken_ms(lambda: matcher.fill_next_token_bitmask(bits, 0))
        follow = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: vocabulary.size])
        follow = follow[~np.isin(follow, grammar.end_token_ids)]
        if len(follow):
            token = int(dice.choice(follow))
            took_ms = max(took_ms, taken_ms(lambda token=token: matcher.accept_token(token)))  # type: ignore[misc]
        if took_ms > limits.token_ms:
            return (
                f"takes {took_ms:.0f} ms to say which tokens may follow one; at most {limits.token_ms:g} ms are "
                "allowed; make it simpler"
            )
        if not len(follow):
            return None
    return None


def _reason(error: Exception) -> str:
    """What xgrammar says, without the time and the place in its source."""
    text = " ".join(str(error).split())
    return text.split(": ", 1)[-1] if text.startswith("[") else text


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
