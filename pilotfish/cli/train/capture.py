"""``pilotfish train capture``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pilotfish.cli.console import note, stderr
from pilotfish.cli.pull import fetch
from pilotfish.cli.train.shared import Dtype, TargetModel, Threads, use_threads

if TYPE_CHECKING:
    from draft_svc.training import capture as capturing


def capture(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where shards go; an interrupted capture there goes on.")],
    target_model: TargetModel = "smollm2",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with `messages`, or with `turns`. Given answers are only read."),
    ] = None,
    ask_itself: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of documents whose question the target writes too. Left out: 0, or all."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Answer tokens that are enough.")] = 500_000,
    features: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="States to keep: hidden.K or final. Left out: EAGLE-3's three, and final."
        ),
    ] = None,
    temperatures: Annotated[
        str,
        typer.Option(metavar="T,...", help="An answer takes one of these; what stands there twice, twice as often."),
    ] = "0,0,0,0,0,0.7,0.7,1,1,1",
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of an answer.")] = 256,
    max_len: Annotated[
        int, typer.Option(metavar="N", help="Of prompt and answer; longer prompts are left out.")
    ] = 1024,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Documents written at once.")] = 32,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Same seed, same documents.")] = 0,
    threads: Threads = None,
) -> None:
    """Have the target answer prompts, and keep its hidden states.

    They are computed as the target service computes them, batched the
    same way, so that a head sees in training what it will be given.
    Ctrl-C loses what makes no whole shard yet; the same command goes on.

    [dim]$ pilotfish train capture --prompts prompts.jsonl --ask-itself 0.5 --out data[/]
    """
    from draft_svc.training.capture import CaptureConfig
    from draft_svc.training.capture import capture as run
    from draft_svc.training.documents import Plan, read_conversations
    from pilotfish.runtime.config import ModelConfig

    conversations = read_conversations(prompts) if prompts is not None else []
    plan = Plan(
        conversations=tuple(conversations),
        temperatures=_numbers("--temperatures", temperatures),
        ask_itself=(0.0 if conversations else 1.0) if ask_itself is None else ask_itself,
        seed=seed,
    )
    folder = fetch(target_model)
    names = _every_scheme_reads(ModelConfig.from_folder(folder).layers) if features is None else features.split(",")
    config = CaptureConfig(plan=plan, features=tuple(names), max_tokens=max_tokens, max_len=max_len, rows=rows)
    use_threads(threads)
    with _progress(tokens) as on_progress:
        manifest = run(folder, out, config, answer_tokens=tokens, dtype=dtype, on_progress=on_progress)
    if left_out := len(conversations) - manifest.recipe["prompts"]:
        note(f"{left_out} prompts leave no room for an answer within --max-len {max_len}, and were left out")
    if manifest.answer_tokens < tokens:
        note("the prompts are used up; give more of them, or --ask-itself above 0")
    note(
        f"{out} holds {manifest.documents} documents, {manifest.answer_tokens} answer tokens and "
        f"{', '.join(manifest.features)} at each"
    )


def _every_scheme_reads(layers: int) -> list[str]:
    """The three states of EAGLE-3, as far as so few layers have them, and the last one, which the other heads take."""
    from draft_svc.drafters.eagle3 import default_layers

    return [*(f"hidden.{index}" for index in sorted(set(default_layers(layers))) if 0 <= index <= layers), "final"]


@contextmanager
def _progress(tokens: int) -> Iterator[Callable[[capturing.Progress], None]]:
    """Shows how far a capture is: in a terminal a bar, elsewhere a line for every tenth."""
    if not stderr.is_terminal:
        shown = 0

        def tell(progress: capturing.Progress) -> None:
            nonlocal shown
            tenths = 10 * progress.answer_tokens // tokens
            if tenths > shown:
                shown = tenths
                note(f"{progress.answer_tokens} of {tokens} answer tokens, {progress.documents} documents")

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("answer tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task("capturing", total=tokens)
        yield lambda progress: bar.update(
            task, completed=progress.answer_tokens, description=f"capturing, {progress.documents} documents"
        )


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers of at least 0 with commas between them."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise typer.BadParameter(f"{flag} is {text!r}; it must be numbers of at least 0, such as 0,0.7,1")
    return numbers
