"""What one step of a model costs on this CPU: the kernels beside plain torch, layers and output layer.

    python bench/step_time.py [--model FOLDER] [--threads N] [--repeats N]

Loads the model once for each way of running it, then times steps of several shapes, the ways taking
turns; medians in milliseconds. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pilotfish.runtime.loading import load_model
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.steps import TokenRows

PAGE_SIZE = 16
SHAPES = {  # rows, new tokens of each, cached tokens of each
    "1 row": (1, 1, 100),
    "1 row, 5 tokens": (1, 5, 100),
    "8 rows": (8, 1, 100),
    "8 rows, 5 tokens": (8, 5, 100),
    "1 row after 1000": (1, 1, 1000),
    "prompt of 512": (1, 512, 0),
}
WAYS = {
    "float32": {"dtype": "float32"},
    "float32, torch": {"dtype": "float32", "kernels": "torch"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, torch": {"dtype": "bfloat16", "kernels": "torch"},
    "int8": {"dtype": "float32", "quantize": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder (SmolLM2-135M, fetched if need be)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of torch and of the kernels (all)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of every way (5)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = arguments.model or smollm2()
    times: dict[tuple[str, str], list[float]] = {(way, shape): [] for way in WAYS for shape in SHAPES}
    models = {way: PagedModel(load_model(folder, **how), pages=1024) for way, how in WAYS.items()}
    turns = [(way, shape) for _ in range(arguments.repeats) for way in WAYS for shape in SHAPES]
    for way, shape in track(turns, description="steps", transient=True):
        times[way, shape] += step_times(models[way], *SHAPES[shape])
    table = Table("milliseconds", *SHAPES, title=f"{folder.name}, {arguments.threads} threads", title_justify="left")
    for way in WAYS:
        table.add_row(way, *(f"{statistics.median(times[way, shape]):.1f}" for shape in SHAPES))
    Console().print(table)


@torch.inference_mode()
def step_times(model: PagedModel, rows: int, new: int, cached: int) -> Iterator[float]:
    """Steps as the target runs them: outputs for every token, or of a long prompt for its last."""
    pages = -(-(new + cached) // PAGE_SIZE)
    ids = np.arange(rows * new) % model.decoder.config.vocab_size
    arrays = (ids, [new] * rows, [cached] * rows, [pages] * rows, np.arange(pages * rows))
    step = TokenRows(*(np.array(array, np.int32) for array in arrays))
    outputs = torch.arange(rows * new) if new < PAGE_SIZE else torch.tensor([new - 1])
    count = 3 if new * rows < 100 else 1
    for turn in range(count + 1):
        started = time.perf_counter()
        model.logits(model.extend(step), outputs)
        if turn:  # the first finds another model's weights in the caches
            yield 1000 * (time.perf_counter() - started)


def smollm2() -> Path:
    from pilotfish.cli.pull import fetch

    return fetch("smollm2")


if __name__ == "__main__":
    main()
