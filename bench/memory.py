"""What the target process takes beside what it must: its weights, once, and its KV pages.

    python bench/memory.py [--model MODEL] [--pages N]

Starts target and orchestrator for each kind of weights, asks 16 prompts at once, and reads from Linux what the target
takes: now (VmRSS) and at most so far (VmHWM), loading included. The goal is at most weights + pages + 500 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from services import service

from pilotfish import AsyncClient, SamplingParams
from pilotfish.bench.prompts import shipped
from pilotfish.checkpoints.pull import pull
from pilotfish.runtime.config import ModelConfig

ALLOWED = 500e6  # bytes beyond weights and pages
PAGE_SIZE = 16
SETTINGS = {  # flags, bytes per weight, bytes per number in the pages
    "float32": (["--dtype", "float32"], 4, 4),
    "bfloat16": (["--dtype", "bfloat16"], 2, 2),
    "int8 weights": (["--dtype", "float32", "--quantize", "int8"], 1 + 2 / 32, 4),  # 32 share a scale of two bytes
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name, Hugging Face id or folder (smollm2)")
    parser.add_argument("--pages", type=int, default=1024, help=f"KV pages of {PAGE_SIZE} slots (1024)")
    arguments = parser.parse_args()
    folder = pull(arguments.model)
    table = Table("MB", "weights", "pages", "+ 500", "now", "at most", title="target process", title_justify="left")
    for name, (flags, weight_size, value_size) in SETTINGS.items():
        weights, pages = weight_count(folder) * weight_size, cache_values(folder, arguments.pages) * value_size
        now, most = serve(folder, [*flags, "--pages", str(arguments.pages)])
        goal = weights + pages + ALLOWED
        cells = (f"{value / 1e6:.0f}" for value in (weights, pages, goal, now, most))
        table.add_row(name, *cells, style="green" if most <= goal else "red")
    Console().print(table)


def weight_count(folder: Path) -> int:
    """Numbers in the checkpoint; an output layer that is the embedding counts once."""
    count = 0
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            count += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def cache_values(folder: Path, pages: int) -> int:
    """Numbers in the KV pages: K and V of every slot and layer."""
    config = ModelConfig.from_folder(folder)
    return 2 * pages * PAGE_SIZE * config.layers * config.kv_heads * config.head_dim


def serve(folder: Path, flags: list[str]) -> tuple[int, int]:
    """Bytes of the target process after the requests: now, and at most."""
    model = ["--model", str(folder), "--listen", "127.0.0.1:0"]
    with (
        service(["-m", "target_svc", *model, *flags, "--page-size", str(PAGE_SIZE)]) as target,
        service(["-m", "orchestrator", *model, "--target", target.address]) as orchestrator,
    ):
        asyncio.run(ask(orchestrator.address))
        status = Path(f"/proc/{target.pid}/status").read_text(encoding="ascii")
    now, most = (int(re.findall(rf"{name}:\s*(\d+) kB", status)[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


async def ask(address: str) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    async with AsyncClient(address) as client:
        questions = [[{"role": "user", "content": str(prompt.content)}] for prompt in shipped()[:16]]
        await asyncio.gather(*(client.chat(question, params) for question in questions))


if __name__ == "__main__":
    main()
