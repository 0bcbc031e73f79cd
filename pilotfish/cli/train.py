"""``pilotfish train``: from a target's own text to a head that drafts for it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pilotfish.cli.console import note, stderr, stdout
from pilotfish.cli.pull import fetch
from pilotfish.errors import InvalidArgumentError

if TYPE_CHECKING:
    from draft_svc.training import capture as capturing
    from draft_svc.training.evaluate import Evaluation

app = typer.Typer(
    name="train",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train a drafter for your own target: [bold]capture[/], [bold]fit[/], [bold]evaluate[/].",
    epilog="docs/training.md tells the whole way.",
)

TargetModel = Annotated[str, typer.Option("--target-model", metavar="MODEL", help="Name, Hugging Face id or folder.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="That the target computes in; take what it is served in."),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Of torch and kernels. Left out: torch's choice.")
]


@app.command(rich_help_panel="In this order")
def prompts(
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines to write.")],
    wheel: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Wheel of reasoning-gym, chatterbot-corpus or ifcraftcorpus; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Same sources and seed, same prompts.")] = 0,
) -> None:
    """Write questions for a target to answer, from free sources.

    Templates of our own and the functions of Python's standard library
    are always at hand; wheels of free packages add tasks, small talk and
    passages to sum up. Any file of your users' questions is better.

    [dim]$ pip download --no-deps reasoning-gym chatterbot-corpus ifcraftcorpus[/]
    [dim]$ pilotfish train prompts --out prompts.jsonl --wheel reasoning_gym*.whl[/]
    """
    from draft_svc.training.prompts import gather

    found = gather(wheel or [], seed)
    try:
        out.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--out is {out}, which cannot be written ({error.strerror})") from error
    note(f"wrote {len(found)} prompts to {out}")


@app.command(rich_help_panel="In this order")
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
    Ctrl-C loses a shard at most; the same command goes on.

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
    names = _default_features(ModelConfig.from_folder(folder).layers) if features is None else features.split(",")
    config = CaptureConfig(plan=plan, features=tuple(names), max_tokens=max_tokens, max_len=max_len, rows=rows)
    _use_threads(threads)
    with _capture_progress(tokens) as on_progress:
        manifest = run(folder, out, config, answer_tokens=tokens, dtype=dtype, on_progress=on_progress)
    if left_out := len(conversations) - manifest.recipe["prompts"]:
        note(f"{left_out} prompts leave no room for an answer within --max-len {max_len}, and were left out")
    if manifest.answer_tokens < tokens:
        note("the prompts are used up; give more of them, or --ask-itself above 0")
    note(
        f"{out} holds {manifest.documents} documents, {manifest.answer_tokens} answer tokens and "
        f"{', '.join(manifest.features)} at each"
    )


@app.command(rich_help_panel="In this order")
def evaluate(
    head: Annotated[Path, typer.Option(metavar="DIR", help="Head or draft model.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Captured text.")],
    target_model: TargetModel = "smollm2",
    draft_length: Annotated[int, typer.Option(metavar="K", min=1, help="Draft tokens of a chain.")] = 4,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens from one chain to the next.")] = 8,
    anchors: Annotated[int, typer.Option(metavar="N", min=1, help="Chains at each temperature, at most.")] = 4000,
    all_documents: Annotated[
        bool, typer.Option("--all", metavar="", help="Judge on all documents, those trained on included.")
    ] = False,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one object.")] = False,
) -> None:
    """Judge a head by the code that will serve it, on documents it has not seen.

    No service is started: captured answers are played to the drafter,
    which drafts at every few tokens of them. For speed, and for other
    prompts than those captured, measure a running deployment:
    [bold]pilotfish bench[/].

    [dim]$ pilotfish train evaluate --head heads/mtp --data data[/]
    """
    from draft_svc.training.evaluate import EvaluationConfig
    from draft_svc.training.evaluate import evaluate as run

    config = EvaluationConfig(length=draft_length, every=every, anchors=anchors, held_out=not all_documents)
    _use_threads(threads)
    with _counting("evaluating", 2 * anchors, "chains") as on_anchor:
        found = run(head, fetch(target_model), data, config, dtype=dtype, on_anchor=on_anchor)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    stdout.print(_table(found))
    if found.greedy_tokens_per_round is not None:
        stdout.print(f"greedy: [bold]{found.greedy_tokens_per_round:.2f}[/] tokens per round of {draft_length} drafts")
    if found.expected_tokens_per_round is not None:
        stdout.print(f"temperature 1: [bold]{found.expected_tokens_per_round:.2f}[/] tokens per round expected")


def _table(found: Evaluation) -> Table:
    """A row for each draft step."""
    table = Table(title=f"{found.drafter} on {found.documents} documents", title_justify="left")
    for name in ("draft step", "judged", "accepted", "judged", "expected", "loss", "top-1", "top-5"):
        table.add_column(name, justify="right", style="green" if name in ("accepted", "expected") else "")
    for index in range(max(len(found.greedy), len(found.sampled))):
        greedy = found.greedy[index] if index < len(found.greedy) else None
        sampled = found.sampled[index] if index < len(found.sampled) else None
        table.add_row(
            str(index + 1),
            *(("–", "–") if greedy is None else (f"{greedy.judged}", f"{greedy.accepted:.1%}")),
            *(
                ("–",) * 5
                if sampled is None
                else (
                    f"{sampled.judged}",
                    f"{sampled.expected_acceptance:.1%}",
                    f"{sampled.loss:.2f}",
                    f"{sampled.top1:.1%}",
                    f"{sampled.top5:.1%}",
                )
            ),
        )
    table.caption = "accepted: greedily, of those whose earlier drafts were; the rest at temperature 1"
    return table


def _default_features(layers: int) -> list[str]:
    """The three states of EAGLE-3 (HEADS.md, section 1.3) and the last one, which MTP, EAGLE-1 and Medusa take."""
    return [*(f"hidden.{index}" for index in sorted({min(2, layers), layers // 2, max(layers - 3, 0)})), "final"]


@contextmanager
def _counting(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Counts in a bar up to ``total``, of which there may be less; not a terminal: says what, once."""
    if not stderr.is_terminal:
        note(what)
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _capture_progress(tokens: int) -> Iterator[Callable[[capturing.Progress], None]]:
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


def _use_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
