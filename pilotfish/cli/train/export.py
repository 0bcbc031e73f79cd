"""``pilotfish train export``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.cli.console import note
from pilotfish.cli.pull import fetch
from pilotfish.cli.train.shared import Dtype, TargetModel, Threads, evaluating, use_threads
from pilotfish.errors import InvalidArgumentError

_FILES = ("config.json", "model.safetensors")


def export(
    run: Annotated[Path, typer.Option(metavar="DIR", help="What `fit` was given for --out.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Captured text, to judge on what was held out.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to ship; its name is the head's.")],
    target_model: TargetModel = "smollm2",
    anchors: Annotated[int, typer.Option(metavar="N", min=1, help="Chains to judge by, at each temperature.")] = 4000,
    all_documents: Annotated[
        bool, typer.Option("--all", metavar="", help="Judge on all documents: of text that was kept apart as a whole.")
    ] = False,
    license: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the head, for its card.")] = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Copy the best head of a run into a folder to ship, with a model card.

    The head is in the public format of its scheme already. The card
    says what it was trained on, for how long, and what it accepts.

    [dim]$ pilotfish train export --run runs/mtp --data data --out heads/mtp[/]
    """
    from draft_svc.drafters.checkpoint import Checkpoint
    from draft_svc.drafters.kinds import kind_of
    from draft_svc.training.card import Training, card
    from draft_svc.training.evaluate import EvaluationConfig, evaluate
    from draft_svc.training.shards import Manifest

    head = run / "head"
    checkpoint = Checkpoint.read(head)
    training = Training.read(run / "log.jsonl")
    use_threads(threads)
    with evaluating(2 * anchors) as on_anchor:
        config = EvaluationConfig(anchors=anchors, held_out=not all_documents)
        found = evaluate(head, fetch(target_model), data, config, dtype=dtype, on_anchor=on_anchor)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(head / name, out / name)
    except OSError as error:
        raise InvalidArgumentError(f"--out is {out}, which cannot be written ({error.strerror})") from error
    size = (out / "model.safetensors").stat().st_size
    kind = kind_of(checkpoint)
    text = card(out.name, kind, checkpoint.config, size, Manifest.read(data), training, found, license)
    (out / "README.md").write_text(text, encoding="utf-8")
    note(f"{out} holds the head and its card; serve it: pilotfish up --target {target_model} --draft {out}")
