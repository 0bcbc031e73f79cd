"""``pilotfish demo``: the whole of Pilotfish in a minute, with numbers of this machine."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from pilotfish import extras
from pilotfish.cli.answer import LEGEND, show, show_cost
from pilotfish.cli.console import stderr, stdout, waiting
from pilotfish.cli.pull import fetch
from pilotfish.cli.running import running_server
from pilotfish.cli.up import MAX_DRAFT_LENGTH

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
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each answer is timed.")] = 2,
    draft_length: Annotated[
        int, typer.Option(metavar="K", min=1, max=MAX_DRAFT_LENGTH, help="Most draft tokens a round.")
    ] = 6,
) -> None:
    """Pull SmolLM2-135M, start the three services, answer, and measure with and without the draft.

    The target computes in float32, exactly; the draft is the same model in
    int8, a quarter of the size and nearly always right. The text is the
    target's own, token for token.

    [dim]$ pilotfish demo[/]
    """
    from pilotfish.client.blocking import Client

    extras.require("serve", "pilotfish demo")
    stderr.print(Text(f"model: {fetch('smollm2')}", style="dim"), soft_wrap=True)
    with (
        running_server(["--dtype", "float32", "--draft-length", str(draft_length)]) as address,
        Client(address) as client,
    ):
        stdout.print(Text(f"\n{_PROMPTS[0]}\n", style="bold"))
        completion = show(_ask(client, _PROMPTS[0], max_tokens, None), stdout)
        if stdout.is_terminal:
            stdout.print(f"\n{LEGEND}")
        show_cost(completion.usage, stdout)
        with_draft, without = _measure(client, max_tokens, repeats)
        stdout.print(_table(with_draft, without))
        stdout.print(_verdict(with_draft, without), soft_wrap=True)
        stdout.print(_about_the_draft(with_draft, without), soft_wrap=True)


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

    def round_ms(self, part: str) -> float | None:
        """The median round's part in milliseconds, averaged over the answers; None without a round."""
        answers = [run.usage for repeats in self.runs for run in repeats if run.usage.rounds]
        return statistics.mean(getattr(usage.round_median, part) for usage in answers) / 1e3 if answers else None


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
    parts = {"target": "target_us", "draft": "draft_us", "hops": "hops_us", "orchestrator": "orchestrator_us"}
    for name, part in parts.items():
        rows[f"a round: {name}"] = partial(_milliseconds, part)
    for name, value in rows.items():
        table.add_row(name, value(with_draft), value(without))
    return table


def _milliseconds(part: str, measured: _Measured) -> str:
    value = measured.round_ms(part)
    return "–" if not value else f"{value:.1f} ms"  # 0 where nothing was drafted


def _verdict(with_draft: _Measured, without: _Measured) -> str:
    """Whether all answers are the same; where they are not, from which token on."""
    count = sum(len(repeats) for measured in (with_draft, without) for repeats in measured.runs)
    lines = []
    for prompt, *both in zip(_PROMPTS, with_draft.runs, without.runs, strict=True):
        first, *others = (run.token_ids for repeats in both for run in repeats)
        if position := next((_first_difference(first, other) for other in others if other != first), None):
            lines.append(f"[yellow]not the same text[/] from token {position} on: {prompt}")
    if not lines:
        return f"[green]the same text[/], with and without the draft, token for token, in all {count} answers"
    lines.append("The draft decides nothing. But sums differ in the last bits with the size of a batch,")
    lines.append("and that can decide between two tokens that the target finds almost equally likely.")
    return "\n".join(lines)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The 1-based position at which two sequences part."""
    pairs = enumerate(zip_longest(one, other), start=1)
    return next(position for position, (a, b) in pairs if a != b)


def _about_the_draft(with_draft: _Measured, without: _Measured) -> str:
    change = without.seconds / with_draft.seconds
    speed = f"{change:.2f} times as fast" if change >= 1 else f"{1 / change:.2f} times slower"
    return (
        f"With this draft: {speed}. It is the target itself, rounded to int8: it reads a\n"
        "quarter of the memory for each token. On a GPU, take a small model of the same\n"
        "tokenizer instead: pilotfish up --target BIG --draft SMALL"
    )


def _ratio(part: int, whole: int, shape: str) -> str:
    return shape.format(part / whole) if whole else "–"


def _ask(client: Client, prompt: str, max_tokens: int, draft_length: int | None) -> Stream:
    from pilotfish.client.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, draft_length=draft_length)
    return client.chat_stream([{"role": "user", "content": prompt}], params)
