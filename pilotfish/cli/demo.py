"""``pilotfish demo``: the whole of Pilotfish in a minute, with numbers of this machine."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from pilotfish.cli.answer import LEGEND, show, summary
from pilotfish.cli.children import die_with_parent
from pilotfish.cli.console import stderr, stdout, waiting
from pilotfish.cli.pull import fetch
from pilotfish.errors import UnavailableError

if TYPE_CHECKING:
    from pilotfish.client.blocking import Client, Stream
    from pilotfish.client.results import Completion

_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Count from one to twenty in words.",
    "Write a Python function that adds two numbers.",
)


def demo(
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each answer, at most.")] = 64,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each answer is timed.")] = 3,
    draft_layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Layers of the draft. Left out: a quarter of the target's.")
    ] = None,
    draft_length: Annotated[int, typer.Option(metavar="K", min=1, help="Most draft tokens a round.")] = 4,
) -> None:
    """Pull SmolLM2-135M, start the three services, answer, and measure with and without the draft.

    [dim]$ pilotfish demo[/]
    """
    from pilotfish.client.blocking import Client

    stderr.print(Text(f"model: {fetch('smollm2')}", style="dim"), soft_wrap=True)
    flags = ["--draft-length", str(draft_length)]
    if draft_layers is not None:
        flags += ["--draft-layers", str(draft_layers)]
    with _running_server(flags) as address, Client(address) as client:
        stdout.print(Text(f"\n{_PROMPTS[0]}\n", style="bold"))
        completion = show(_ask(client, _PROMPTS[0], max_tokens, None), stdout)
        stdout.print(LEGEND if stdout.is_terminal else "")
        stderr.print(Text(summary(completion.usage) + "\n", style="dim"), soft_wrap=True)
        with_draft, without = _measure(client, max_tokens, repeats)
        stdout.print(_table(with_draft, without))
        stdout.print(f"draft: {client.server_info().draft_model}", soft_wrap=True)
        stdout.print(_verdict(with_draft, without), soft_wrap=True)


@dataclass(frozen=True)
class _Measured:
    """The prompts' answers under one setting: every repeat of every prompt."""

    runs: list[list[Completion]]
    """[prompts][repeats]"""

    def total(self, field: str) -> int:
        """Of a count of the usage, over one answer to each prompt."""
        return sum(getattr(repeats[0].usage, field) for repeats in self.runs)

    @property
    def seconds(self) -> float:
        """For one answer to each prompt; the median of the repeats of each."""
        return sum(statistics.median(run.usage.total_us for run in repeats) for repeats in self.runs) / 1e6

    @property
    def texts(self) -> list[str]:
        return [repeats[0].text for repeats in self.runs]


def _measure(client: Client, max_tokens: int, repeats: int) -> tuple[_Measured, _Measured]:
    """Answers with and without the draft, in turns, so that a busy moment of the machine hits both alike."""
    settings: dict[int | None, list[list[Completion]]] = {length: [[] for _ in _PROMPTS] for length in (None, 0)}
    what = "measuring with and without the draft"
    with waiting() as report:
        for repeat in range(repeats):
            # The first to ask a prompt finds nothing in the prefix cache, so that they take turns in this too.
            order = list(settings.items())[:: -1 if repeat % 2 else 1]
            for index, prompt in enumerate(_PROMPTS):
                report(what, repeat * len(_PROMPTS) + index + 1, repeats * len(_PROMPTS))
                for draft_length, runs in order:
                    with _ask(client, prompt, max_tokens, draft_length) as stream:
                        deque(stream, maxlen=0)
                    runs[index].append(stream.result)
    return _Measured(settings[None]), _Measured(settings[0])


def _table(with_draft: _Measured, without: _Measured) -> Table:
    table = Table(title=f"{len(_PROMPTS)} answers, one after the other", title_justify="left")
    table.add_column("")
    table.add_column("with the draft", justify="right", style="green")
    table.add_column("without", justify="right")
    rows: dict[str, Callable[[_Measured], str]] = {
        "tokens": lambda measured: f"{measured.total('completion_tokens')}",
        "rounds": lambda measured: f"{measured.total('rounds')}",
        "drafted": lambda measured: f"{measured.total('drafted')}",
        "accepted": lambda measured: f"{measured.total('accepted')}",
        "acceptance": lambda measured: _ratio(measured.total("accepted"), measured.total("drafted"), "{:.0%}"),
        "tokens per round": lambda measured: _ratio(
            measured.total("accepted") + measured.total("rounds"), measured.total("rounds"), "{:.2f}"
        ),
        "time": lambda measured: f"{measured.seconds:.2f} s",
        "tokens per second": lambda measured: f"{measured.total('completion_tokens') / measured.seconds:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, value(with_draft), value(without))
    return table


def _verdict(with_draft: _Measured, without: _Measured) -> str:
    """The two in words; a slower draft is said to be slower."""
    same = sum(a == b for a, b in zip(with_draft.texts, without.texts, strict=True))
    change = without.seconds / with_draft.seconds
    speed = f"{change:.2f} times as fast" if change >= 1 else f"{1 / change:.2f} times slower"
    return f"with the draft: the same text in {same} of {len(_PROMPTS)} answers, {speed} on this machine"


def _ratio(part: int, whole: int, shape: str) -> str:
    return shape.format(part / whole) if whole else "–"


def _ask(client: Client, prompt: str, max_tokens: int, draft_length: int | None) -> Stream:
    from pilotfish.client.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, draft_length=draft_length)
    return client.chat_stream([{"role": "user", "content": prompt}], params)


@contextmanager
def _running_server(flags: list[str]) -> Iterator[str]:
    """Runs ``pilotfish up`` on a free port while the block runs; yields its address."""
    argv = [sys.executable, "-P", "-m", "pilotfish", "up", "--listen", "127.0.0.1:0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process, which then stops that one
            preexec_fn=die_with_parent(),
        )
        try:
            yield _address(process, argv, log)
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[str], argv: list[str], log: IO[bytes]) -> str:
    assert process.stdout is not None
    with waiting() as report:
        report(f"starting target, draft and orchestrator: {' '.join(argv[3:])}")
        line = process.stdout.readline()
    if not line.startswith("ready "):
        process.wait()
        log.seek(0)
        raise UnavailableError(f"`pilotfish up` did not start:\n{log.read().decode(errors='replace').strip()}")
    stderr.print(Text(line.strip(), style="dim"), soft_wrap=True)
    return line.split()[1]
