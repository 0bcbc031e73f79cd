"""What a round costs on top of its models, at batch 1, beside what bare gRPC costs on the same machine.

    python bench/round_overhead.py [--dtype bfloat16] [--repeats N] [--tokens N]

Starts `pilotfish up` on SmolLM2-135M (with itself in int8 as draft), asks the same prompt with the
draft and without, alternating, and prints medians over all rounds. The floor is a gRPC echo of the
same size whose server reads as many bytes between its messages as the target does between its steps:
after that the caches are cold, as they are in a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import grpc
import numpy as np
from services import service

from pilotfish import Client, RoundTimes, SamplingParams
from pilotfish.rpc.server import run
from pilotfish.rpc.steps_service import ModelThread

PROMPT = "Tell me about the sea."
WEIGHT_BYTES = 538_000_000  # of SmolLM2-135M in fp32
PARTS = ("target_us", "draft_us", "hops_us", "orchestrator_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="requests of each kind (3)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens per request (40)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target (float32)")
    parser.add_argument("--echo-server", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo_server:
        run(serve_echo())
        return
    with service([__file__, "--echo-server"]) as server:
        print(f"bare gRPC echo, cold: {asyncio.run(echo(server.address)):.2f} ms a hop")
    rounds: dict[int, list[RoundTimes]] = {4: [], 0: []}
    up = ["-m", "pilotfish", "up", "--dtype", arguments.dtype, "--listen", "127.0.0.1:0"]
    with service(up) as server, Client(server.address) as client:
        for _ in range(arguments.repeats):
            for draft_length, times in rounds.items():
                params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, draft_length=draft_length)
                with client.stream(PROMPT, params) as stream:
                    times += [piece.times for piece in list(stream)[1:]]  # the first piece is the prefill
    for draft_length, times in rounds.items():
        print_row(f"K = {draft_length}, {len(times)} rounds", times)


def print_row(name: str, times: list[RoundTimes]) -> None:
    medians = {part: statistics.median(getattr(each, part) for each in times) / 1000 for part in PARTS}
    overhead = statistics.median((each.hops_us + each.orchestrator_us) / 1000 for each in times)
    parts = "  ".join(f"{part.removesuffix('_us')} {value:.2f}" for part, value in medians.items())
    print(f"{name}: {parts}  → everything but the models {overhead:.2f} ms")


async def serve_echo() -> None:
    """Answers each message once it has read as many bytes as the target's weights, on a thread of its own."""
    weights, thread = np.zeros(WEIGHT_BYTES // 8), ModelThread()

    def step() -> bytes:
        started = time.perf_counter_ns()
        weights.sum()
        return (time.perf_counter_ns() - started).to_bytes(8, "little")

    async def execute(_: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(await thread.call(step) + message)

    class Echo(grpc.GenericRpcHandler):
        def service(self, _: object) -> grpc.RpcMethodHandler:  # type: ignore[type-arg]
            return grpc.stream_stream_rpc_method_handler(execute)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready echo 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def echo(address: str) -> float:
    """Median of a round trip less the server's own work, in milliseconds."""
    hops = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/echo/Execute")()
        for _ in range(30):
            started = time.perf_counter_ns()
            await call.write(bytes(500))
            reply = await call.read()
            hops.append(time.perf_counter_ns() - started - int.from_bytes(reply[:8], "little"))
    return statistics.median(hops) / 1e6


if __name__ == "__main__":
    main()
