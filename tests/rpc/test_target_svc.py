"""The target worker over loopback: real service, real stream, tiny random model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rows import Row, greedy_rows, ints, sampling_rows, token_rows
from tiny_models import load_reference, make_tiny_llama
from torch import Tensor

from pilotfish import noise
from pilotfish.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from pilotfish.noise import Purpose
from pilotfish.rpc import codec, status
from pilotfish.rpc.channel import CHUNK_BYTES
from pilotfish.steps import DrawRule, Ints, SamplingRows, Supports, TargetResult, TargetStep
from pilotfish.v1 import target_pb2, target_pb2_grpc
from target_svc.server import main

PROMPT = np.random.default_rng(5).integers(4, 280, 60).tolist()


def step(
    *rows: Row,
    outputs: Sequence[int] | None = None,
    sampling: SamplingRows | None = None,
    rule: DrawRule = DrawRule.MATCH,
    step_id: int = 1,
    copies: Sequence[tuple[int, int]] = (),
    **fields: Any,
) -> TargetStep:
    """Greedy rows whose every token wants an output, unless told otherwise."""
    batch = token_rows(*rows, copies=copies)
    return TargetStep(
        step_id=step_id,
        rows=batch,
        sampling=sampling or greedy_rows(len(rows)),
        output_nodes=ints(*(range(len(batch.token_ids)) if outputs is None else outputs)),
        draw_rules=np.full(len(rows), rule, np.uint8),
        **fields,
    )


def rules(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


@torch.inference_mode()
def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    logits: Tensor = load_reference(folder)(torch.tensor([tokens])).logits[0]
    return logits


def slow_draw(p: Tensor, seed: int, purpose: Purpose, round_index: int, position: int) -> int:
    """The exponential race, in numpy."""
    key = noise.key(seed, purpose, round_index, position)
    return noise.race(np.array([key]), np.arange(len(p)), p.double().numpy())


def test_greedy_text_equals_hugging_face_with_chunked_prefill(start_target: Any, tiny_folder: Path) -> None:
    async def scenario() -> list[int]:
        async with start_target() as worker:
            stream = worker.stream()
            grant = await stream.open()
            pages = [grant.first_page + p for p in (9, 4, 30, 11, 0, 17)]
            for start in range(0, 60, 25):
                result = await stream.run(step(Row(PROMPT[start : start + 25], start, pages)))
            text = [int(result.token_ids[-1])]
            for i in range(29):
                result = await stream.run(step(Row(text[-1:], 60 + i, pages), step_id=10 + i))
                assert result.step_id == 10 + i
                text.append(int(result.token_ids[0]))
            await stream.close()
            return text

    wanted = load_reference(tiny_folder).generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=3
    )
    assert asyncio.run(scenario()) == wanted[0, 60:].tolist()


def test_a_tree_beside_a_prefill_chunk_answers_for_every_node(start_target: Any, tiny_folder: Path) -> None:
    parents = [-1, 0, 0, 1, 2]
    tree, other = [40, 50, 60, 70, 80], PROMPT[:20]

    async def scenario() -> Ints:
        async with start_target() as worker:
            stream = worker.stream()
            grant = await stream.open()
            assert (grant.first_page, grant.page_count, grant.vocab_size, grant.max_len) == (0, 32, 280, 512)
            await stream.run(step(Row(PROMPT[:15], 0, [3, 8])))
            result: TargetResult = await stream.run(step(Row(other, 0, [1, 2]), Row(tree, 15, [3, 8], parents)))
            return result.token_ids

    tokens = asyncio.run(scenario())
    assert tokens[:20].tolist() == reference_logits(tiny_folder, other).argmax(-1).tolist()
    for node in range(5):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        logits = reference_logits(tiny_folder, PROMPT[:15] + [tree[i] for i in path])
        assert tokens[20 + node] == logits[-1].argmax()


@pytest.mark.parametrize("rule", list(DrawRule))
def test_draws_are_keyed_by_seed_position_and_for_outside_draws_by_round(
    rule: DrawRule, start_target: Any, tiny_folder: Path
) -> None:
    sampling = sampling_rows(2, temperature=0.8, top_k=40, seed=11, round_index=6)
    rows = (Row(PROMPT[:9], 0, [0]), Row(PROMPT[20:24], 0, [1], [-1, 0, 0, 2]))

    async def scenario() -> Ints:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.open()
            asked = step(*rows, sampling=sampling, rule=rule, outputs=[3, 8, 9, 11, 12])
            result: TargetResult = await stream.run(asked)
            return result.token_ids

    tokens = asyncio.run(scenario())
    histories = [PROMPT[:4], PROMPT[:9], PROMPT[20:21], [PROMPT[20], PROMPT[22]], [PROMPT[20], *PROMPT[22:24]]]
    for i, history in enumerate(histories):
        scores = reference_logits(tiny_folder, history)[-1] / 0.8
        p = scores.masked_fill(scores < scores.topk(40).values[-1], float("-inf")).softmax(-1)
        match = rule is DrawRule.MATCH
        seed, purpose = (11 if i < 2 else 12), Purpose.MATCH if match else Purpose.OUTSIDE
        assert tokens[i] == slow_draw(p, seed, purpose, 0 if match else 6, len(history))


def test_supports_are_answered_with_p_and_an_outside_token(start_target: Any, tiny_folder: Path) -> None:
    groups = [[5, 200, 31], [], list(range(280))]
    supports = Supports(ints(*map(len, groups)), ints(*(i for group in groups for i in group)))
    sampling = sampling_rows(1, temperature=0.9, seed=3, round_index=2)
    asked = step(
        Row(PROMPT[:6], 0, [0]), outputs=[1, 4, 5], sampling=sampling, rule=DrawRule.OUTSIDE, supports=supports
    )

    async def scenario() -> Any:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.open()
            return await stream.run(asked)

    result = asyncio.run(scenario())
    p = (reference_logits(tiny_folder, PROMPT[:6]) / 0.9).softmax(-1)
    np.testing.assert_allclose(result.support_probs[:3], p[1, groups[0]], atol=1e-5)
    np.testing.assert_allclose(result.support_probs[3:], p[5], atol=1e-5)
    np.testing.assert_allclose(result.tail_masses, [1 - float(p[1, groups[0]].sum()), 1, 0], atol=1e-5)
    assert result.tail_masses[1] == 1
    outside = p[1].clone()
    outside[groups[0]] = 0
    wanted = [slow_draw(outside, 3, Purpose.OUTSIDE, 2, 2), slow_draw(p[4], 3, Purpose.OUTSIDE, 2, 5), -1]
    assert result.token_ids.tolist() == wanted


def test_the_same_step_run_twice_answers_the_same_bits(start_target: Any) -> None:
    supports = Supports(ints(0, 0, 2, 1), ints(9, 30, 77))
    asked = step(
        Row(PROMPT[:30], 0, [4, 1]),
        Row(PROMPT[30:33], 2, [7], [-1, 0, 0]),
        outputs=[29, 30, 31, 32],
        sampling=sampling_rows(2, temperature=0.7, top_p=0.9),
        rule=DrawRule.OUTSIDE,
        supports=supports,
        feature_rules=rules(2, 1),
    )

    async def scenario() -> list[Any]:
        async with start_target(features="hidden.1") as worker:
            stream = worker.stream()
            await stream.open()
            await stream.run(step(Row(PROMPT[40:42], 0, [7])))
            return [await stream.run(asked) for _ in range(2)]

    first, second = asyncio.run(scenario())
    for name in ("token_ids", "tail_masses", "support_probs", "features"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
    assert first.compute_us > 0


def test_slot_copies_come_before_the_step(start_target: Any, tiny_folder: Path) -> None:
    """Tree 0 -> (1, 2) after 10 tokens; node 2 is accepted and moved beside node 0."""

    async def scenario() -> int:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.open()
            await stream.run(step(Row(PROMPT[:10], 0, [5])))
            await stream.run(step(Row([40, 50, 60], 10, [5], [-1, 0, 0])))
            asked = step(Row([70], 12, [5]), copies=[(5 * 16 + 12, 5 * 16 + 11)])
            return int((await stream.run(asked)).token_ids[0])

    assert asyncio.run(scenario()) == reference_logits(tiny_folder, [*PROMPT[:10], 40, 60, 70])[-1].argmax()


def test_steps_in_flight_are_answered_in_order(start_target: Any) -> None:
    async def scenario() -> list[int]:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.open()
            for i in range(5):
                await stream.send(step(Row(PROMPT[: 40 - 9 * i], 0, range(3)), step_id=i))
            return [(await stream.receive()).step_id for _ in range(5)]

    assert asyncio.run(scenario()) == [0, 1, 2, 3, 4]


def change_rows(**fields: Any) -> Callable[[TargetStep], TargetStep]:
    return lambda s: dataclasses.replace(s, rows=dataclasses.replace(s.rows, **fields))


def change(**fields: Any) -> Callable[[TargetStep], TargetStep]:
    return lambda s: dataclasses.replace(s, **fields)


BAD_STEPS: list[tuple[str, Callable[[TargetStep], TargetStep]]] = [
    (r"token_ids\[1\] is 280; must be in \[0, 280\)", change_rows(token_ids=ints(5, 280))),
    (r"page_ids\[0\] is 9; this stream was granted \[4, 7\]", change_rows(page_ids=ints(9))),
    (r"page_counts\[0\] is 1; row 0 needs 17 slots", change_rows(starts=ints(15))),
    (r"start \+ length\[0\] is 513", change_rows(starts=ints(511))),
    (r"lengths\[0\]", change_rows(lengths=ints(0))),
    (r"slot_copies\[0\] is 0; this stream was granted slots", change_rows(slot_copies=np.array([[0, 64]], np.int32))),
    (r"parents\[1\] is 1", change_rows(parents=ints(-1, 1))),
    (r"output_nodes\[1\] is 2", change(output_nodes=ints(0, 2))),
    (r"temperatures\[0\] is -1", change(sampling=sampling_rows(1, temperature=-1.0))),
    (r"top_ps\[0\] is 2", change(sampling=sampling_rows(1, top_p=2.0))),
    (r"draw_rules\[0\] is 0", change(draw_rules=np.zeros(1, np.uint8))),
    (r"feature_rules is given; this target stores no features", change(feature_rules=rules(2))),
    (r"feature_rules\[0\] is 0; must be NONE", change(feature_rules=rules(0))),
    (r"length of feature_rules is 2; must be 0 or equal the 1 rows", change(feature_rules=rules(1, 1))),
    (r"feature_rules\[0\] is 4; must be NONE", change(feature_rules=rules(4))),
    (r"supports\.counts is positive in a MATCH row", change(supports=Supports(ints(1, 0), ints(7)))),
    (
        r"page_ids is inconsistent; slot 64 \(page 4\) would be written by two tokens",
        lambda s: step(Row([5], 0, [4]), Row([6], 0, [4])),
    ),
    (r"tokens is 301; at most 300", lambda s: step(Row([5] * 301, 0, [4, 5, 6, 7] * 5))),
]


def test_bad_steps_are_refused_by_name_and_other_streams_go_on(start_target: Any) -> None:
    good = step(Row([5, 6], 0, [4]))

    async def scenario() -> None:
        async with start_target(max_step_tokens=300) as worker:
            other = worker.stream()
            await other.open(4)
            before = await other.run(step(Row(PROMPT[:20], 0, [0, 1])))
            stream = worker.stream()
            await stream.open(4)
            right = await stream.run(good)
            for message, spoil in BAD_STEPS:
                with pytest.raises(InvalidArgumentError, match=message):
                    await stream.run(spoil(good))
                again = await stream.run(good)  # the stream that was refused goes on as well
                assert again.token_ids.tolist() == right.token_ids.tolist()
                after = await other.run(step(Row(PROMPT[19:20], 19, [0, 1])))
                assert after.token_ids[0] == before.token_ids[-1]

    asyncio.run(scenario())


def test_a_stream_opens_first_and_only_once(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.send(step(Row([5], 0, [0])))
            with pytest.raises(InvalidArgumentError, match=r"first message.*open"):
                await stream.receive()
            stream = worker.stream()
            await stream.open(1)
            with pytest.raises(InvalidArgumentError, match="after `open`"):
                await stream.open(1)
            stream = worker.stream()
            with pytest.raises(InvalidArgumentError, match="page_count is 0"):
                await stream.open(0)
            empty = worker.stream()
            await empty.close()

    asyncio.run(scenario())


def test_streams_have_disjoint_pages_until_there_are_no_more(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target() as worker:
            first, second = worker.stream(), worker.stream()
            mine, rest = await first.open(20), await second.open()
            assert (mine.first_page, mine.page_count, rest.first_page, rest.page_count) == (0, 20, 20, 12)
            assert mine.incarnation != rest.incarnation
            same = [
                (await stream.run(step(Row(PROMPT[:30], 0, [grant.first_page, grant.first_page + 5])))).token_ids
                for stream, grant in ((first, mine), (second, rest))
            ]
            assert same[0].tolist() == same[1].tolist()
            with pytest.raises(OverloadedError, match="at most 0 of 32"):
                await worker.stream().open(1)
            await first.close()
            assert (await worker.stream().open(20)).first_page == 0

    asyncio.run(scenario())


def test_a_cancelled_stream_gives_its_pages_back_after_the_step_that_runs(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target() as worker:
            stream = worker.stream()
            await stream.open()
            await stream.send(step(Row(PROMPT, 0, range(4))))
            stream.call.cancel()
            for _ in range(100):
                try:
                    grant = await worker.stream().open()
                    break
                except OverloadedError:
                    await asyncio.sleep(0.02)
            assert grant.page_count == 32

    asyncio.run(scenario())


def test_the_loop_answers_while_the_model_thread_is_busy(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target() as worker:
            free = threading.Event()
            worker.thread.submit(free.wait, 30)
            stream = worker.stream()
            opening = asyncio.ensure_future(stream.open())
            request = health_pb2.HealthCheckRequest(service="pilotfish.v1.TargetService")
            answer = await health_pb2_grpc.HealthStub(worker.channel).Check(request, timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert not opening.done()
            free.set()
            assert (await opening).page_count == 32

    asyncio.run(scenario())


def test_stopping_ends_streams_with_unavailable_and_refuses_new_ones(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target() as worker:
            idle, busy = worker.stream(), worker.stream()
            await idle.open(4)
            await busy.open(4)
            free = threading.Event()
            worker.thread.submit(free.wait, 30)
            await busy.send(step(Row(PROMPT[:5], 0, [4])))
            await worker.streams.stop()
            for stream in (idle, busy):
                with pytest.raises(UnavailableError, match="shutting down"):
                    await stream.receive()
            with pytest.raises(UnavailableError, match="shutting down"):
                await worker.stream().open(1)
            free.set()

    asyncio.run(scenario())


async def read_features(worker: Any, incarnation: int, slots: list[int]) -> list[Any]:
    call = target_pb2_grpc.TargetServiceStub(worker.channel).ReadFeatures(
        target_pb2.ReadFeaturesRequest(incarnation=incarnation, slots=codec.pack(ints(*slots), "<i4"))
    )
    try:
        return [codec.tensor_from_pb(response.features, "features") async for response in call]
    except grpc.aio.AioRpcError as error:
        raise status.from_grpc(error, worker.address) from None


def test_features_equal_the_hidden_states_of_hugging_face(start_target: Any, tiny_folder: Path) -> None:
    async def scenario() -> tuple[Any, Any]:
        async with start_target(features="hidden.0,hidden.1,final") as worker:
            stream = worker.stream()
            grant = await stream.open()
            assert (grant.features, grant.feature_width) == (("hidden.0", "hidden.1", "final"), 192)
            await stream.run(step(Row(PROMPT[:25], 0, [6, 2, 9])))
            asked = step(Row(PROMPT[25:40], 25, [6, 2, 9]), feature_rules=rules(2))
            beside = (await stream.run(asked)).features
            slots = [page * 16 + offset for page in (6, 2, 9) for offset in range(16)][:40]
            stored = await read_features(worker, grant.incarnation, slots)
            return beside, np.concatenate(stored)

    beside, stored = asyncio.run(scenario())
    with torch.inference_mode():
        states = load_reference(tiny_folder)(torch.tensor([PROMPT[:40]]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[0], states[1], states[-1]], -1)[0].numpy()
    np.testing.assert_allclose(stored, wanted, atol=1e-4)
    assert beside.tobytes() == stored[25:40].tobytes()


def test_the_features_of_matched_rows_follow_the_draws(start_target: Any) -> None:
    """A tree of which one path is the target's own text, a chain that agrees for one token, and a prompt."""
    rows = [Row(PROMPT[:10], 0, [0]), Row(PROMPT[:9], 0, [1]), Row(PROMPT[:7], 0, [2])]

    async def scenario() -> None:
        async with start_target(features="hidden.1,final") as worker:
            stream = worker.stream()
            grant = await stream.open()
            text = [PROMPT[9]]
            await stream.run(step(*rows))
            for start in range(9, 13):
                text.append(int((await stream.run(step(Row(text[-1:], start, [0])))).token_ids[0]))
            first = int((await stream.run(step(Row([PROMPT[8]], 8, [1])))).token_ids[0])
            others = [4 + (token - 3) % 276 for token in text]
            tree = Row([text[0], others[1], text[1], text[2], others[2], text[3]], 9, [0], [-1, 0, 0, 2, 1, 3])
            chain = Row([PROMPT[8], first, 4, 5], 8, [1])
            asked = step(tree, chain, Row([9, 9], 7, [2]), feature_rules=rules(3, 3, 2))
            result = await stream.run(asked)
            assert result.token_ids[7] != 4
            slots = [*(9 + node for node in (0, 2, 3, 5)), 16 + 8, 16 + 9, 32 + 7, 32 + 8]
            stored = np.concatenate(await read_features(worker, grant.incarnation, slots))
            assert result.features.tobytes() == stored.tobytes()

    asyncio.run(scenario())


def test_features_are_read_while_a_step_is_under_way(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target(features="final") as worker:
            stream = worker.stream()
            grant = await stream.open()
            wanted = (await stream.run(step(Row(PROMPT[:20], 0, [0, 1]), feature_rules=rules(2)))).features
            free = threading.Event()
            worker.thread.submit(free.wait, 30)
            await stream.send(step(Row(PROMPT[20:22], 20, [0, 1]), step_id=2))
            read = await asyncio.wait_for(read_features(worker, grant.incarnation, list(range(20))), 20)
            assert np.concatenate(read).tobytes() == wanted.tobytes()
            free.set()
            assert (await stream.receive()).step_id == 2

    asyncio.run(scenario())


def test_features_come_in_chunks_and_errors_have_their_status(start_target: Any) -> None:
    async def scenario() -> None:
        async with start_target(features="final", dtype="bfloat16") as worker:
            stream = worker.stream()
            grant = await stream.open(8)
            await stream.run(step(Row(PROMPT[:20], 0, [0, 1])))
            many = list(range(20)) * 500
            chunks = await read_features(worker, grant.incarnation, many)
            assert len(chunks) > 1
            assert all(chunk.nbytes <= CHUNK_BYTES for chunk in chunks)
            once = await read_features(worker, grant.incarnation, list(range(20)))
            assert once[0].dtype == np.uint16
            assert np.array_equal(np.concatenate(chunks), np.tile(once[0], (500, 1)))
            assert (await read_features(worker, grant.incarnation, []))[0].shape == (0, 64)
            with pytest.raises(
                InvalidArgumentError, match=r"slots\[1\] is 128; this stream was granted slots \[0, 127\]"
            ):
                await read_features(worker, grant.incarnation, [0, 128])
            with pytest.raises(NotFoundError, match="not open here"):
                await read_features(worker, grant.incarnation ^ 1, [0])
            await stream.close()
            await worker.thread.call(int)  # which takes the pages back, after the client has its status
            with pytest.raises(NotFoundError, match="not open here"):
                await read_features(worker, grant.incarnation, [0])
        async with start_target() as worker:
            with pytest.raises(FailedPreconditionError, match="--features"):
                await read_features(worker, 1, [0])

    asyncio.run(scenario())


def spoilt(folder: Path, name: str, content: bytes) -> Path:
    make_tiny_llama(folder)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda f: f / "nowhere", [], "nowhere does not exist.*pilotfish pull"),
        (lambda f: spoilt(f, "model.safetensors", b"\x08\0\0\0"), [], "model.safetensors is corrupt or cut short"),
        (lambda f: spoilt(f, "config.json", b'{"architectures": ["Fish"]}'), [], "Fish.*LlamaForCausalLM"),
        (lambda f: spoilt(f, "tokenizer.json", b"{}"), [], "tokenizer.json is no tokenizer"),
        (lambda f: make_tiny_llama(f), ["--layers", "9"], "layers is 9"),
        (lambda f: make_tiny_llama(f), ["--max-len", "513"], "max_len is 513"),
        (lambda f: make_tiny_llama(f), ["--features", "hidden.7"], "hidden.7"),
        (lambda f: make_tiny_llama(f), ["--device", "fish"], "device is 'fish'"),
        (lambda f: make_tiny_llama(f), ["--pages", "0"], "--pages"),
        (lambda f: make_tiny_llama(f), ["--listen", "nohost.invalid:1"], "listen is 'nohost.invalid:1'"),
    ],
)
def test_a_start_that_fails_prints_one_message_and_exits_with_2(
    make: Callable[[Path], Path], flags: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["--model", str(folder), "--pages", "4", "--listen", "127.0.0.1:0", *flags])
    assert exit_info.value.code == 2
    printed = capfd.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("pilotfish target: ")]
    assert len(lines) == 1
    assert "Traceback" not in printed
    assert re.search(message, lines[0])


def test_a_port_in_use_is_an_error_and_sigterm_a_clean_end(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real process: it is ready, holds its port, ends open streams with UNAVAILABLE, exits with 0."""
    argv = [sys.executable, "-m", "target_svc", "--model", str(tiny_folder), "--listen", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            ready, name, address = process.stdout.readline().split()
            assert (ready, name) == ("ready", "target")
            with pytest.raises(SystemExit) as exit_info:
                main(["--model", str(tiny_folder), "--pages", "4", "--listen", address])
            assert exit_info.value.code == 2
            assert "port is in use" in capfd.readouterr().err
            asyncio.run(_stop_with_an_open_stream(process, address))
            assert process.wait(20) == 0
        finally:
            process.kill()


async def _stop_with_an_open_stream(process: subprocess.Popen[str], address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = target_pb2_grpc.TargetServiceStub(channel).Execute()
        await call.write(target_pb2.ExecuteTargetRequest(open={"page_count": 1}))
        await call.read()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.UNAVAILABLE
