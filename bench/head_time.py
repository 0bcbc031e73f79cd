"""What one pass of a draft head costs on this CPU: the kernels beside plain torch.

    python bench/head_time.py [--threads N] [--repeats N]

An MTP head of SmolLM2-135M's sizes, with random weights: embeddings, a projection of [embedding ; state], one layer
after 100 cached tokens, an output layer of 8192 rows. *Around* is what a pass costs beside the kernels: the same head
with nothing to multiply. The ways take turns; medians in milliseconds. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from step_time import PAGE_SIZE, WAYS
from torch import Tensor

from pilotfish.runtime.batch import build_batch
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.layer_shapes import layer_shapes
from pilotfish.runtime.loading import resolve_dtype
from pilotfish.runtime.models.kernels import choose_kernels
from pilotfish.steps import TokenRows

CPU = torch.device("cpu")
CACHED = 100
SHAPES = {"1 token": (1, 1), "4 tokens": (1, 4), "4 rows": (4, 1), "16 rows": (16, 1)}  # rows, new tokens of each
SMOLLM2 = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
    }
)
TINY = replace(SMOLLM2, vocab_size=64, hidden_size=64, intermediate_size=32, heads=1, kv_heads=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of torch and of the kernels (all)"
    )
    parser.add_argument("--repeats", type=int, default=30, help="turns of every way (30)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heads = {way: Head(SMOLLM2, 8192, **how) for way, how in WAYS.items()}
    heads["around"] = Head(TINY, 64, dtype="float32")
    times: dict[tuple[str, str], list[float]] = {(way, shape): [] for way in heads for shape in SHAPES}
    for way, shape in [(way, shape) for _ in range(arguments.repeats) for way in heads for shape in SHAPES]:
        times[way, shape] += pass_times(heads[way], *SHAPES[shape])
    title = f"a head's pass, {arguments.threads} threads"
    table = Table("milliseconds", *SHAPES, title=title, title_justify="left")
    for way in heads:
        table.add_row(way, *(f"{statistics.median(times[way, shape]):.2f}" for shape in SHAPES))
    Console().print(table)


class Head:
    """The parts that a drafter would put together from a checkpoint."""

    def __init__(
        self, config: ModelConfig, outputs: int, *, dtype: str, quantize: str = "none", kernels: str = "auto"
    ) -> None:
        made = choose_kernels(kernels, config, resolve_dtype(dtype, CPU), CPU, quantize=quantize)
        hidden = config.hidden_size

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape) / shape[-1] ** 0.5).to(made.dtype)

        norms = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        weights = {f"layer.{name}": random(*shape) for name, shape in (layer_shapes(config) | norms).items()}
        self._embed = made.embedding(random(config.vocab_size, hidden))
        self._projection = made.projection(random(hidden, 2 * hidden), None, [random(hidden)] * 2, config.rms_eps)
        self._layers = made.layers(config, weights, ["layer"])
        (self._head,) = made.output_heads(random(outputs, hidden), [random(hidden)], config.rms_eps)
        self._cache = KVCache(config, pages=256, page_size=PAGE_SIZE, dtype=made.dtype, device=CPU)
        self._attention = self._layers.create_attention(PAGE_SIZE)
        self._states = random(64, hidden)

    def run(self, rows: TokenRows) -> Tensor:
        batch = build_batch(rows, PAGE_SIZE, CPU)
        self._attention.plan(batch)
        x = self._projection(self._embed(batch.token_ids), self._states[: len(batch.token_ids)])
        return self._head.logits(self._layers.forward(x, batch, self._cache, self._attention))


@torch.inference_mode()
def pass_times(head: Head, rows: int, new: int) -> Iterator[float]:
    pages = -(-(new + CACHED) // PAGE_SIZE)
    arrays = ([0] * rows * new, [new] * rows, [CACHED] * rows, [pages] * rows, np.arange(pages * rows))
    step = TokenRows(*(np.array(array, np.int32) for array in arrays))
    for turn in range(4):
        started = time.perf_counter()
        head.run(step)
        if turn:  # the first finds another head's weights in the caches
            yield 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
