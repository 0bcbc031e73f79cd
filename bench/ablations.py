"""What each choice in serving a head is worth: rounds of captured greedy text, one thing at a time done otherwise.

Documents that ``pilotfish train fit`` held out are played to the drafter that serves, round by round: it drafts a
chain, what equals the text is accepted, and the next round begins behind the token that follows. Nothing but the
drafter runs, so that minutes show what takes an hour through all services; and no timing is in the numbers.

    python bench/ablations.py --head heads/mtp --target ~/.cache/pilotfish/models/smollm2 --data raw \\
        --other 'norms none=heads/mtp-none' --out bench/results/ablations

- without rebuild: slots of accepted draft tokens stay as the head wrote them, on states of its own; only tokens that
  it has not run yet are told, with true states. What that costs others: vllm-project/vllm#14649.
- reads pre_norm, feeds back pre_norm: a head trained on states behind the norm is given those before it, the target's
  or its own.
- others: heads trained otherwise, as served.

Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from head_results import table
from heads import named
from rich.console import Console

from draft_svc.drafters import create_drafter
from draft_svc.server import DraftConfig
from draft_svc.training.evaluate import read_documents
from draft_svc.training.replay import Replay
from draft_svc.training.shards import CapturedDocument, Manifest
from pilotfish.bench.origin import this_machine
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, PilotfishError
from pilotfish.runtime.weights import weights_hash

PAGE_SIZE = 16
stderr = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Variant:
    """A head and how it is served: a row of the table."""

    name: str
    head: Path
    switches: Mapping[str, str] = field(default_factory=dict)
    """Fields of ``DraftConfig``."""
    rebuild: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a variant's rounds brought."""

    reached: tuple[int, ...]
    """Element i: rounds that accepted i draft tokens or more; so the first is all of them."""

    @property
    def tokens_per_round(self) -> float:
        return 1 + sum(self.reached[1:]) / self.reached[0]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Of each draft position, the share that was accepted where those before it were; 0 where none were."""
        pairs = zip(self.reached, self.reached[1:], strict=False)
        return tuple(after / before if before else 0.0 for before, after in pairs)


@dataclass(frozen=True)
class Text:
    """Captured documents to play."""

    manifest: Manifest
    documents: Sequence[CapturedDocument]

    @classmethod
    def read(cls, folder: Path, target: Path, most: int | None = None, *, held_out: bool = True) -> Text:
        """The folder's documents of temperature 0.

        Args:
            folder: of shards.
            target: folder of the target, whose states they must hold.
            most: so many at most, the first ones.
            held_out: only those that ``fit`` holds out.

        Raises:
            FailedPreconditionError: if the text is of another target.
            InvalidArgumentError: if there is none.
        """
        manifest = Manifest.read(folder)
        if weights_hash(target) != manifest.weights_hash:
            raise FailedPreconditionError(f"{folder} holds text of {manifest.model_id}, not of the target in {target}")
        documents = [each for each in read_documents(folder, manifest, held_out=held_out) if each.temperature == 0]
        if not documents:
            holds = "holds out" if held_out else "holds"
            raise InvalidArgumentError(f"{folder} {holds} no document of temperature 0; capture more, greedily")
        return cls(manifest, documents[:most])


def variants(head: Path, others: Mapping[str, str]) -> list[Variant]:
    """The rows of the table: what ``head`` loses by each thing done otherwise, then the other heads."""
    reads, feeds = {"h_source": "pre_norm"}, {"feedback": "pre_norm"}
    return [
        Variant("as served", head),
        Variant("without rebuild", head, rebuild=False),
        Variant("reads pre_norm", head, reads),
        Variant("feeds back pre_norm", head, feeds),
        Variant("reads and feeds back pre_norm", head, reads | feeds),
        *(Variant(name, Path(folder)) for name, folder in others.items()),
    ]


def measure(variant: Variant, target: Path, text: Text, *, length: int, rows: int, dtype: str) -> Outcome:
    """Plays the text to one variant.

    Args:
        variant: a head that reads states which were captured.
        target: folder of its target.
        text: to be played.
        length: draft tokens of a round.
        rows: documents at once.
        dtype: that the drafter computes in.

    Raises:
        FailedPreconditionError: if the head's tokens are not the text's.
        InvalidArgumentError: if it reads no states, or others than were captured, or no answer is long enough.
    """
    pages_per_row = -(-(max(len(each.token_ids) for each in text.documents) + length) // PAGE_SIZE)
    settings: dict[str, Any] = {"model": variant.head, "target_model": target, "dtype": dtype, "page_size": PAGE_SIZE}
    settings |= {"pages": rows * pages_per_row, **variant.switches}
    # Not by the constructor, which would read the environment of a draft service.
    drafter = create_drafter(DraftConfig.model_validate(settings))
    if not drafter.info.features:
        raise InvalidArgumentError(f"{variant.head} reads no states of a target; must be a head")
    if drafter.info.tokenizer_hash != text.manifest.tokenizer_hash:
        raise FailedPreconditionError(f"{variant.head} speaks other tokens than {text.manifest.model_id}")
    replay = Replay(
        drafter,
        rows=rows,
        pages_per_row=pages_per_row,
        page_size=PAGE_SIZE,
        columns=text.manifest.columns(drafter.info.features),
    )
    hits = [each.hits() for each in replay.rounds(text.documents, length, rebuild=variant.rebuild)]
    if not hits:
        raise InvalidArgumentError(f"length is {length}; no answer of {text.manifest.model_id} is longer than that")
    return Outcome(tuple(sum(each >= i for each in hits) for i in range(length + 1)))


def markdown(outcomes: Mapping[str, Outcome]) -> str:
    """Acceptance per position, where the tokens before were accepted; the first outcome is what the others lose on."""
    first = next(iter(outcomes.values()))
    header = ["", *(str(i) for i in range(1, len(first.reached))), "tokens per round", "", "rounds"]
    return table(header, [[name, *_cells(outcome, first)] for name, outcome in outcomes.items()])


def _cells(outcome: Outcome, first: Outcome) -> Iterable[str]:
    change = outcome.tokens_per_round / first.tokens_per_round - 1
    yield from (f"{share:.3f}" for share in outcome.acceptance)
    yield f"**{outcome.tokens_per_round:.3f}**"
    yield "" if outcome is first else f"{change:+.1%}"
    yield str(outcome.reached[0])


def main(
    head: Annotated[Path, typer.Option(metavar="FOLDER", help="An MTP head.")],
    target: Annotated[Path, typer.Option(metavar="FOLDER")],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Captured text with the states before the last norm.")],
    out: Annotated[Path, typer.Option(metavar="NAME", help="Writes NAME.json and NAME.md.")],
    other: Annotated[list[str], typer.Option(metavar="NAME=FOLDER", help="A head trained otherwise; repeatable.")] = [],  # noqa: B006
    documents: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most.")] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="No document was trained on: play those not held out too.")
    ] = False,
    length: Annotated[int, typer.Option(metavar="K", min=1, help="Draft tokens of a round.")] = 4,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Documents at once.")] = 16,
    dtype: str = "float32",
) -> None:
    """Measure what each choice in serving a head is worth."""
    text = Text.read(data, target, documents, held_out=not whole)
    outcomes: dict[str, Outcome] = {}
    for variant in variants(head, named("--other", other)):
        stderr.print(variant.name)
        outcomes[variant.name] = measure(variant, target, text, length=length, rows=rows, dtype=dtype)
    facts = {
        "documents": len(text.documents),
        "machine": this_machine(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "reached": {name: outcome.reached for name, outcome in outcomes.items()},
        "tokens_per_round": {name: outcome.tokens_per_round for name, outcome in outcomes.items()},
    }
    out.with_name(f"{out.name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    out.with_name(f"{out.name}.md").write_text(markdown(outcomes) + "\n", encoding="utf-8")
    print(markdown(outcomes))


if __name__ == "__main__":
    try:
        typer.run(main)
    except PilotfishError as error:
        raise SystemExit(f"error: {error}") from error
