"""The three services together, on tiny random models."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, wait_until_idle
from tiny_models import greedy_texts, make_tiny_llama

from draft_svc.drafters import Proposals
from draft_svc.drafters.model import ModelDrafter
from orchestrator.core.rounds import Run
from orchestrator.core.scheduler import Scheduler
from pilotfish import AsyncClient, Client, SamplingParams
from pilotfish.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.steps import DraftStep

PROMPTS = [
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "Once upon a time there was a small fish that swam ahead of the shark, " * 3,
    "def f(x):\n    return x + 1\n",
]


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> dict[str, tuple[int, ...]]:
    """What Hugging Face writes, greedily."""
    return greedy_texts(tiny_folder, PROMPTS, 40)


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("draft_name", ["none", "self", "layers", "other"])
def test_greedy_text_is_hugging_faces(
    draft_length: int,
    draft_name: str,
    reference: dict[str, tuple[int, ...]],
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tiny_draft: LoadedModel,
    other_draft: LoadedModel,
) -> None:
    drafts = {"none": (), "self": (tiny_target,), "layers": (tiny_draft,), "other": (other_draft,)}[draft_name]
    params = SamplingParams(max_tokens=40, draft_length=draft_length)
    with Deployment(tiny_folder, tiny_target, drafts) as deployment, deployment.client() as client:
        for prompt in PROMPTS:  # one at a time, prefix cache cold
            assert client.generate(prompt, params).token_ids == reference[prompt]
        with ThreadPoolExecutor(8) as pool:  # all together, prefix cache hot
            together = list(pool.map(lambda prompt: client.generate(prompt, params), PROMPTS * 2))
        for prompt, completion in zip(PROMPTS * 2, together, strict=True):
            assert completion.token_ids == reference[prompt]
        assert together[2].usage.cached_tokens > 0
        deployment.check_pools()


def test_the_target_as_its_own_greedy_draft_accepts_everything(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:
        for draft_length in (1, 4, 8):
            params = SamplingParams(max_tokens=1 + 5 * (draft_length + 1), ignore_eos=True, draft_length=draft_length)
            usage = client.generate(PROMPTS[0], params).usage
            assert usage.rounds == 5
            assert usage.accepted == usage.drafted == 5 * draft_length
            assert usage.accepted_per_position == (5,) * draft_length


def test_preempted_requests_keep_their_texts(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]] * 3
    params = SamplingParams(max_tokens=40)
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), pages=40, page_size=4) as deployment:
        with deployment.client() as client, ThreadPoolExecutor(9) as pool:
            completions = list(pool.map(lambda prompt: client.generate(prompt, params), prompts))
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.token_ids == reference[prompt]
        assert sum(completion.usage.preemptions for completion in completions) > 0
        deployment.check_pools()


def test_a_server_that_chooses_draft_lengths_writes_the_same_text(
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tiny_draft: LoadedModel,
    other_draft: LoadedModel,
    reference: dict[str, tuple[int, ...]],
) -> None:
    for draft in (tiny_target, tiny_draft, other_draft):
        deployment = Deployment(tiny_folder, tiny_target, (draft,), draft_length="auto")
        with deployment, deployment.client() as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
            info = client.server_info()
            assert (info.draft_length, info.adaptive_draft_length) == (16, True)
            for _ in range(3):
                completions = pool.map(lambda p, c=client: c.generate(p, SamplingParams(max_tokens=40)), PROMPTS)
                assert [each.token_ids for each in completions] == [reference[prompt] for prompt in PROMPTS]
            named = client.generate(PROMPTS[0], SamplingParams(max_tokens=21, ignore_eos=True, draft_length=3))
            assert max(piece.drafted for piece in named.pieces) == 3
            plain = client.generate(PROMPTS[0], SamplingParams(max_tokens=21, draft_length=0))
            assert plain.usage.drafted == 0
            wait_until_idle(deployment)


def test_seeded_text_is_the_same_whichever_draft_length_and_batch(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, other_draft: LoadedModel
) -> None:
    texts: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for drafts in ((), (tiny_target,), (tiny_draft,), (other_draft, tiny_draft)):
        with Deployment(tiny_folder, tiny_target, drafts) as deployment, deployment.client() as client:
            jobs = [(prompt, seed, k) for prompt in PROMPTS[:2] for seed in (0, 2**64 - 1) for k in (1, 4, 8)]

            def generate(job: tuple[str, int, int], client: Client = client) -> tuple[int, ...]:
                prompt, seed, k = job
                params = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, top_k=50, seed=seed, draft_length=k)
                return client.generate(prompt, params).token_ids

            alone = [generate(job) for job in jobs[:3]]
            with ThreadPoolExecutor(12) as pool:
                together = list(pool.map(generate, jobs))
            for (prompt, seed, _), ids in zip(jobs[:3] + jobs, alone + together, strict=True):
                texts.setdefault((prompt, seed), set()).add(ids)
    assert all(len(variants) == 1 for variants in texts.values())
    assert len({next(iter(variants)) for variants in texts.values()}) == len(texts)  # seeds and prompts do matter


def test_pieces_say_how_each_token_came_about_and_add_up(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel
) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment, deployment.client() as client:
        with client.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True)) as stream:
            pieces = list(stream)
        result = stream.result
        assert "".join(piece.text for piece in pieces) == result.text
        assert tuple(token.id for piece in pieces for token in piece.tokens) == result.token_ids
        kinds = [[token.kind for token in piece.tokens] for piece in pieces]
        assert kinds[0] == ["bonus"]
        assert all(kind == "accepted" for run in kinds for kind in run[:-1])
        usage = result.usage
        assert sum(run.count("accepted") for run in kinds) == usage.accepted == sum(usage.accepted_per_position)
        assert sum(piece.drafted for piece in pieces) == usage.drafted
        assert usage.rounds == len(pieces) - 1
        assert usage.completion_tokens == 40 == usage.accepted + usage.rounds + 1


def test_stops_end_the_text_inside_an_accepted_run(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:
        whole = client.generate(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, draft_length=0))
        middle = whole.text[10:13]
        stopped = client.generate(
            PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, stop=(middle,), draft_length=8)
        )
        assert stopped.text == whole.text[: whole.text.index(middle)]
        assert stopped.finish_reason == "stop"
        assert stopped.usage.completion_tokens == len(stopped.token_ids) < 40
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        end = whole.token_ids[6]
        on_token = client.generate(
            PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(end,), draft_length=8)
        )
        assert on_token.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
        assert on_token.finish_reason == "stop"
        deployment.check_pools()


def test_chat_uses_the_template(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    with Deployment(tiny_folder, tiny_target) as deployment, deployment.client() as client:
        params = SamplingParams(max_tokens=12)
        assert client.chat(messages, params).token_ids == client.generate(ids, params).token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("x", SamplingParams(temperature=-1), r"temperature is -1; must be in \[0, inf\)"),
        ("x", SamplingParams(temperature=float("nan")), "temperature is nan"),
        ("x", SamplingParams(top_p=2), r"top_p is 2; must be in \(0, 1\]"),
        ("x", SamplingParams(top_p=0), r"top_p is 0; must be in \(0, 1\]"),
        ("x", SamplingParams(min_p=1.5), "min_p is 1.5"),
        ("x", SamplingParams(top_k=-3), "top_k is -3; must be at least 0"),
        ("x", SamplingParams(max_tokens=0), "max_tokens is 0; must be at least 1"),
        ("x", SamplingParams(draft_length=1000), "draft_length is 1000; must be at most 64"),
        ("x", SamplingParams(stop=("a", "")), r"stop\[1\] is empty"),
        ("x", SamplingParams(stop=tuple("abcdefghijklmnopqrstuvwxyz")), "stop is 26 texts; at most 16"),
        ("x" * (9 << 20), SamplingParams(), r"the request is larger than \S+ takes: .* larger than max"),
        ("x " * 100_000, SamplingParams(), "prompt is 200000 characters; at most 511 tokens fit"),
        ("", SamplingParams(), "prompt is empty"),
        ([], SamplingParams(), "prompt is empty"),
        ("x", SamplingParams(stop_token_ids=(9999,)), r"stop_token_ids\[0\] is 9999; must be in \[0, 280\)"),
        ([1, 9999], SamplingParams(), r"prompt token_ids\[1\] is 9999; must be in \[0, 280\)"),
        ([5] * 600, SamplingParams(), "prompt is 600 tokens; at most 511 fit"),
        ([5] * 500, SamplingParams(max_tokens=64), "max_tokens is 64; at most 12 fit after a prompt of 500"),
    ],
)
def test_bad_input_is_named_and_others_go_on(
    prompt: str | list[int], params: SamplingParams, message: str, running: tuple[Deployment, Client]
) -> None:
    deployment, client = running
    with client.stream(PROMPTS[0], SamplingParams(max_tokens=30, ignore_eos=True)) as other:
        next(iter(other))
        with pytest.raises(InvalidArgumentError, match=message):
            client.generate(prompt, params)
        for _ in other:
            pass
    assert other.result.usage.completion_tokens == 30
    deployment.check_pools()


@pytest.fixture(scope="module")
def running(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> object:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment, deployment.client() as client:
        yield deployment, client


def test_an_unknown_model_is_named(running: tuple[Deployment, Client]) -> None:
    with pytest.raises(NotFoundError, match="model is 'gpt-9'; this server has 'tiny'"):
        running[1].generate("x", model="gpt-9")


def test_a_prompt_that_fits_no_pool_is_refused(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, pages=4) as deployment, deployment.client() as client:
        with pytest.raises(InvalidArgumentError, match="the server has cache for 64 in all"):
            client.generate([5] * 60, SamplingParams(max_tokens=10))
        assert client.generate([5] * 54, SamplingParams(max_tokens=10)).usage.prompt_tokens == 54


def test_leaving_early_releases_everything(running: tuple[Deployment, Client]) -> None:
    deployment, client = running
    stream = client.stream(PROMPTS[2], SamplingParams(max_tokens=200, ignore_eos=True))
    next(iter(stream))
    stream.close()
    wait_until_idle(deployment)


def test_a_cancelled_asyncio_task_releases_everything(running: tuple[Deployment, Client]) -> None:
    deployment, _ = running

    async def leave() -> None:
        async with AsyncClient(deployment.address) as client:
            task = asyncio.create_task(client.generate(PROMPTS[2], SamplingParams(max_tokens=300, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    wait_until_idle(deployment)


def test_a_dying_draft_replica_costs_no_request_anything(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment, deployment.client() as client:
        stream = client.stream(PROMPTS[0], SamplingParams(max_tokens=40))
        next(iter(stream))
        deployment.call(deployment.drafts[0].stop())
        for _ in stream:
            pass
        assert stream.result.token_ids == reference[PROMPTS[0]]
        assert client.generate(PROMPTS[1], SamplingParams(max_tokens=40)).token_ids == reference[PROMPTS[1]]


class SlowDrafter(ModelDrafter):
    """Answers every proposal too late."""

    def propose(self, step: DraftStep) -> Proposals:
        time.sleep(0.2)
        return super().propose(step)


class LyingDrafter(ModelDrafter):
    """Answers with tokens that do not exist."""

    def propose(self, step: DraftStep) -> Proposals:
        proposals = super().propose(step)
        return replace(proposals, token_ids=proposals.token_ids + 100_000)


@pytest.mark.parametrize("kind", [SlowDrafter, LyingDrafter])
def test_a_replica_that_hangs_or_lies_costs_its_rows_only_their_proposals(
    kind: type[ModelDrafter], tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    bad = kind(tiny_target, pages=256)
    with Deployment(tiny_folder, tiny_target, (bad,), draft_timeout_s=0.05) as deployment:
        with deployment.client() as client:
            completion = client.generate(PROMPTS[0], SamplingParams(max_tokens=40))
        assert completion.token_ids == reference[PROMPTS[0]]
        assert completion.usage.accepted == 0
        deployment.check_pools()


def test_a_second_replica_takes_over(
    tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_target, tiny_target)) as deployment, deployment.client() as client:
        deployment.call(deployment.drafts[0].stop())
        for prompt in PROMPTS:
            completion = client.generate(prompt, SamplingParams(max_tokens=40))
            assert completion.token_ids == reference[prompt]
            assert completion.usage.accepted == completion.usage.drafted > 0
        assert client.server_info().draft_replica_count == 1


def test_a_target_that_comes_back_goes_on_where_it_was(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment, deployment.client() as client:
        stream = client.stream(PROMPTS[0], SamplingParams(max_tokens=40))
        next(iter(stream))
        deployment.call(deployment.target.stop())
        deployment.call(deployment.start_target(deployment.target.address))
        for _ in stream:
            pass
        assert stream.result.token_ids == reference[PROMPTS[0]]
        deployment.check_pools()


def test_workers_that_come_and_go_change_no_text(
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tiny_draft: LoadedModel,
    other_draft: LoadedModel,
    reference: dict[str, tuple[int, ...]],
) -> None:
    chance = random.Random(5)
    with Deployment(tiny_folder, tiny_target, (tiny_draft, other_draft)) as deployment, deployment.client() as client:

        def ask(prompt: str) -> tuple[str, tuple[int, ...]]:
            return prompt, client.generate(prompt, SamplingParams(max_tokens=40)).token_ids

        with ThreadPoolExecutor(6) as pool:
            answers = pool.map(ask, PROMPTS * 12)
            for _ in range(12):
                time.sleep(chance.uniform(0.05, 0.2))
                victim = chance.choice(["target", 0, 1])
                worker = deployment.target if victim == "target" else deployment.drafts[victim]
                deployment.call(worker.stop())
                start = deployment.start_target if victim == "target" else partial(deployment.start_draft, victim)
                deployment.call(start(worker.address))
            for prompt, token_ids in answers:
                assert token_ids == reference[prompt]
        wait_until_idle(deployment)


def test_a_bug_in_a_round_fails_its_requests_and_not_the_service(
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tiny_draft: LoadedModel,
    reference: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, calls = Scheduler.accept, iter([False, False, True])

    def failing(self: Scheduler, *arguments: Any) -> list[Run]:
        if next(calls, False):
            raise ZeroDivisionError("planted")
        return accept(self, *arguments)

    monkeypatch.setattr(Scheduler, "accept", failing)
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment, deployment.client() as client:
        with pytest.raises(InternalError, match="a round failed: ZeroDivisionError: planted"):
            client.generate(PROMPTS[0], SamplingParams(max_tokens=40))
        assert client.generate(PROMPTS[0], SamplingParams(max_tokens=40)).token_ids == reference[PROMPTS[0]]
        deployment.check_pools()


def test_requests_fail_clearly_once_the_target_stays_away(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, target_timeout_s=0.3) as deployment, deployment.client() as client:
        stream = client.stream(PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
        next(iter(stream))
        deployment.call(deployment.target.stop())
        with pytest.raises(UnavailableError, match=r"the target has been away for 0\.3 s"):
            for _ in stream:
                pass
        assert not client.server_info().target_ready


def test_a_target_that_nobody_listens_as_is_named(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    deployment = Deployment(tiny_folder, tiny_target, target="127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(UnavailableError, match=r"no target answers at 127\.0\.0\.1:1 after 0\.3 s.*pilotfish target"):
        deployment.__enter__()


def test_a_service_of_another_kind_is_refused_at_once(
    tiny_folder: Path, tiny_target: LoadedModel, running: tuple[Deployment, Client]
) -> None:
    deployment = Deployment(tiny_folder, tiny_target, target=running[0].drafts[0].address)
    with pytest.raises(FailedPreconditionError, match="answers, but not this call"):
        deployment.__enter__()


def test_a_draft_of_another_tokenizer_is_refused(tmp_path: Path, tiny_folder: Path, tiny_target: LoadedModel) -> None:
    stranger = load_model(make_tiny_llama(tmp_path, words=20), dtype="float32")
    deployment = Deployment(tiny_folder, tiny_target, (stranger,))
    with pytest.raises(Exception, match=r"has another tokenizer .* Use a draft of the same family"):
        deployment.__enter__()


def test_server_info(running: tuple[Deployment, Client]) -> None:
    info = running[1].server_info()
    assert (info.model, info.max_len, info.vocab_size) == ("tiny", 512, 280)
    assert (info.draft_model, info.draft_replica_count) == ("tiny-draft", 1)
    assert (info.draft_length, info.adaptive_draft_length) == (4, False)
    assert info.target_ready
