"""What gRPC costs: the same models as three processes, and all in one process without a wire.

    python bench/transport.py [--repeats N] [--tokens N] [--draft-layers N]

SmolLM2-135M with its own first layers as draft, one thread per model, batch 1. The two deployments answer the
same prompt in turn, one waiting while the other works; medians over all rounds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from in_process import in_process
from rich.console import Console
from rich.table import Table
from services import service

from draft_svc.drafters import create_drafter
from draft_svc.engine import DraftEngine
from draft_svc.server import DraftConfig
from orchestrator.server import Orchestrator, OrchestratorSettings
from pilotfish import Client, RoundTimes, SamplingParams
from pilotfish.cli.pull import fetch
from pilotfish.rpc.server import run, serve_until_signal
from pilotfish.rpc.steps_service import ModelThread

PROMPT = "Tell me about the sea."
PARTS = ("target_us", "draft_us", "hops_us", "orchestrator_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6, help="answers of each deployment (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens per answer (%(default)s)")
    parser.add_argument("--draft-layers", type=int, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run(serve(fetch("smollm2"), arguments.draft_layers))
        return
    layers = ["--draft-layers", str(arguments.draft_layers)]
    up = ["-m", "pilotfish", "up", "--dtype", "float32", "--listen", "127.0.0.1:0", *layers]
    rounds: dict[str, list[RoundTimes]] = {"three processes, gRPC": [], "one process": []}
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, draft_length=4)
    with (
        service(up, {"OMP_NUM_THREADS": "1"}) as over_grpc,  # `up` would lend each model the other's core
        service([__file__, "--serve", *layers], {"OMP_NUM_THREADS": "1"}) as in_one,
        Client(over_grpc.address) as first,
        Client(in_one.address) as second,
    ):
        for _ in range(arguments.repeats):
            for client, times in zip((first, second), rounds.values(), strict=True):
                with client.stream(PROMPT, params) as stream:
                    times += [piece.times for piece in list(stream)[1:]]  # the first piece is the prefill
    report(rounds)


async def serve(folder: Path, draft_layers: int) -> None:
    """Everything in this process, on three threads: models of their own, and the loop."""
    from pilotfish.runtime.loading import load_worker_model
    from target_svc.engine import TargetEngine
    from target_svc.server import TargetConfig

    target_config = TargetConfig(model=folder, dtype="float32", pages=1024)
    draft_config = DraftConfig(model=folder, dtype="float32", layers=draft_layers, pages=1024)
    target = TargetEngine(load_worker_model(target_config, folder), pages=target_config.page_count)
    draft = DraftEngine(create_drafter(draft_config), pages=draft_config.page_count)
    threads = ModelThread(), ModelThread()
    orchestrator = Orchestrator(
        OrchestratorSettings(model=folder, target="target", draft=["draft"], listen="127.0.0.1:0"),
        target_kind=in_process("target", target, threads[0]),
        draft_kind=in_process("draft", draft, threads[1], draft.capabilities),
    )
    await serve_until_signal(await orchestrator.start(), "one-process", before_stop=orchestrator.stop)


def report(rounds: dict[str, list[RoundTimes]]) -> None:
    table = Table(title="medians per round, ms", title_justify="left")
    for column in ("", "rounds", *(part.removesuffix("_us") for part in PARTS), "beside the models"):
        table.add_column(column, justify="left" if not column else "right")
    beside = {}
    for name, times in rounds.items():
        medians = [statistics.median(getattr(each, part) for each in times) / 1000 for part in PARTS]
        beside[name] = statistics.median((each.hops_us + each.orchestrator_us) / 1000 for each in times)
        table.add_row(name, str(len(times)), *(f"{value:.2f}" for value in (*medians, beside[name])))
    whole = statistics.median(sum(getattr(each, part) for part in PARTS) for each in next(iter(rounds.values()))) / 1000
    cost = beside["three processes, gRPC"] - beside["one process"]
    console = Console(width=120)
    console.print(table)
    console.print(f"gRPC and processes of their own: {cost:.2f} ms of a round of {whole:.1f} ms, {cost / whole:.1%}")


if __name__ == "__main__":
    main()
