"""``pilotfish train fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pilotfish.cli.console import note, stderr
from pilotfish.cli.pull import fetch
from pilotfish.cli.train.shared import TargetModel, Threads, use_threads

if TYPE_CHECKING:
    from draft_svc.training import fit as fitting


def fit(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Captured text.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint, log and head; a run there goes on.")],
    scheme: Annotated[
        Literal["mtp", "eagle", "eagle3", "medusa", "distill"],
        typer.Option(
            help="eagle: mtp without norms; medusa: as many heads as steps; distill: a small model cut from the target."
        ),
    ] = "mtp",
    target_model: TargetModel = "smollm2",
    init: Annotated[
        str | None,
        typer.Option(metavar="HEAD", help="Name or folder of a head of this scheme to train further. Left out: none."),
    ] = None,
    visits: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answer tokens to train on; one counts each time it is seen.")
    ] = 1_000_000,
    layers: Annotated[int, typer.Option(metavar="N", min=1, help="Of a head.")] = 1,
    norms: Annotated[Literal["all", "none"], typer.Option(help="none is the head of EAGLE-1, for mtp.")] = "all",
    draft_layers: Annotated[
        str, typer.Option(metavar="I,...", help="Layers of the target that a distilled model begins from.")
    ] = "0,1,29",
    draft_vocab: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens to draft: the most frequent ones of the answers.")
    ] = 8192,
    train_output: Annotated[
        bool, typer.Option("--train-output", metavar="", help="An output layer of its own, for eagle3.")
    ] = False,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Draft steps that a slot is trained for; each costs as the first.")
    ] = 2,
    decay: Annotated[float, typer.Option(metavar="X", help="Weight of a step over the one before.")] = 0.8,
    hidden_weight: Annotated[
        float, typer.Option(metavar="X", help="Weight of the states' loss beside the logits'; 0 leaves it out.")
    ] = 0.05,
    teacher_temperature: Annotated[
        float, typer.Option(metavar="T", help="Of the target's law; below 1 favours greedy drafting.")
    ] = 1.0,
    later_slots: Annotated[
        float, typer.Option(metavar="SHARE", help="Of slots that are trained for more than one step, drawn anew.")
    ] = 0.5,
    other_candidates: Annotated[
        int, typer.Option(metavar="N", min=0, help="Random tokens that stand for the rest of the vocabulary; 0: all.")
    ] = 512,
    whole_text: Annotated[
        bool, typer.Option("--whole-text", metavar="", help="Train on prompts too: more text, of the same capture.")
    ] = False,
    optimizer: Annotated[Literal["muon", "adamw"], typer.Option(help="Of matrices; norms take AdamW.")] = "muon",
    lr: Annotated[float, typer.Option(metavar="X", help="Peak learning rate.")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(metavar="X", help="Of matrices.")] = 0.01,
    warmup_steps: Annotated[int, typer.Option(metavar="N", min=0, help="Until the peak.")] = 40,
    cooldown: Annotated[float, typer.Option(metavar="SHARE", help="Of the visits, at the end, falling to 0.")] = 0.3,
    batch_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of a batch, over all processes.")] = 2048,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of matrix products.")] = "bfloat16",
    measure_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps from one measurement on documents held out to the next.")
    ] = 200,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Same seed, same run.")] = 0,
    threads: Threads = None,
) -> None:
    """Train a head on captured text.

    The head begins from the target's own weights, or from those of
    [bold]--init[/]; the target's embeddings and output layer stay as they
    are. Losses go to DIR/log.jsonl, and what drafts best on documents
    held out to DIR/head, in its public format.
    Ctrl-C loses half a minute at most; the same command goes on, also
    with more --visits. Several devices:

    [dim]$ pilotfish train fit --data data --out runs/mtp[/]
    [dim]$ torchrun --nproc-per-node 2 -m pilotfish train fit --data data --out runs/mtp[/]
    """
    from draft_svc.training.config import FitConfig
    from draft_svc.training.fit import Fit
    from draft_svc.training.processes import joined
    from draft_svc.training.trainee import Objective

    config = FitConfig(
        scheme=scheme,
        data=data,
        target_model=fetch(target_model),
        out=out,
        init=None if init is None else fetch(init),
        layers=layers,
        norms=norms,
        draft_layers=_layers(draft_layers),
        draft_vocab=draft_vocab,
        train_output=train_output,
        objective=Objective(
            steps=steps,
            decay=decay,
            hidden_weight=hidden_weight,
            teacher_temperature=teacher_temperature,
            later_slots=later_slots,
            other_candidates=other_candidates,
        ),
        whole_text=whole_text,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        cooldown=cooldown,
        batch_tokens=batch_tokens,
        visits=visits,
        seed=seed,
        dtype=dtype,
        measure_every=measure_every,
    )
    use_threads(threads)
    with joined() as process, _progress(visits, is_shown=process.rank == 0) as report:
        head = Fit(config, process.device).run(report)
    if process.rank == 0:
        note(f"the head is in {head}; judge it: pilotfish train evaluate --head {head} --data {data}")


def _layers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise typer.BadParameter(f"--draft-layers is {text!r}; it must be whole numbers, such as 0,1,29")
    return tuple(map(int, text.split(",")))


@contextmanager
def _progress(visits: int, *, is_shown: bool) -> Iterator[Callable[[fitting.Progress], None]]:
    """Shows losses step by step: in a terminal beside a bar, elsewhere a line for each measurement."""
    if not is_shown:
        yield lambda progress: None
        return
    if not stderr.is_terminal:
        yield lambda progress: note(_measured(progress)) if progress.quality is not None else None
        return
    columns = (
        TextColumn("fitting"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task("", total=visits)

        def tell(progress: fitting.Progress) -> None:
            bar.update(task, completed=progress.position.visits, description=_losses(progress))
            if progress.quality is not None:
                note(_measured(progress))

        yield tell


def _losses(progress: fitting.Progress) -> str:
    """Of each unrolled step."""
    losses = progress.losses
    text = f"loss {_row(losses.logits.tolist())} · right {_row(losses.hits.tolist())}"
    states = losses.states.tolist()
    return f"{text} · states {_row(states)}" if any(states) else text


def _measured(progress: fitting.Progress) -> str:
    quality = progress.quality
    assert quality is not None
    return (
        f"{progress.position.visits} visits: {_losses(progress)} · held out: accepted {_row(quality.conditional)}, "
        f"{quality.tokens_per_round:.2f} tokens per round"
    )


def _row(values: list[float] | tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
