"""Fields of a request, honoured the same with and without speculation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from deployment import Deployment, wait_until_idle
from tiny_models import EOS_ID, greedy_texts, load_reference
from waiting import eventually

from draft_svc.drafters.model import ModelDrafter
from pilotfish import Client, Completion, SamplingParams, TokenLogprobs
from pilotfish.errors import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError
from pilotfish.rpc.status import from_grpc
from pilotfish.runtime.loading import LoadedModel
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import GenerationServiceStub

PROMPT = "The quick brown fox jumps over the lazy dog."
MAX_LEN = 512  # of the tiny models


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with deployment.client() as client:
        yield client


def call(address: str, **fields: Any) -> list[pb.GenerateResponse]:
    """The events of a bare call, in order; raises what the SDK would."""
    with grpc.insecure_channel(address) as channel:
        try:
            return list(GenerationServiceStub(channel).Generate(pb.GenerateRequest(text=PROMPT, **fields)))
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None


# Samples


def test_the_first_sample_is_the_request_alone_and_the_others_draw_for_themselves(
    deployment: Deployment, client: Client
) -> None:
    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True, **fields)

    alone = client.generate(PROMPT, params())
    several = client.generate(PROMPT, params(n=4))
    assert [sample.index for sample in several.samples] == [0, 1, 2, 3]
    assert several.token_ids == alone.token_ids
    assert len({sample.token_ids for sample in several.samples}) == 4
    again = client.generate(PROMPT, params(n=3, draft_length=0))
    assert [sample.token_ids for sample in again.samples] == [s.token_ids for s in several.samples[:3]]
    for sample in several.samples:
        assert sample.usage.completion_tokens == len(sample.token_ids) == 20
        assert "".join(piece.text for piece in sample.pieces) == sample.text
        assert all(piece.index == sample.index for piece in sample.pieces)
    wait_until_idle(deployment)


def test_unseeded_samples_differ_and_greedy_ones_do_not(client: Client) -> None:
    drawn = client.generate(PROMPT, SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, n=5))
    assert len({sample.token_ids for sample in drawn.samples}) == 5
    greedy = client.generate(PROMPT, SamplingParams(max_tokens=20, n=2))
    assert greedy.token_ids == greedy.others[0].token_ids


def test_a_stream_of_samples_says_whose_each_piece_is(client: Client) -> None:
    with client.stream(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, n=2)) as stream:
        pieces = list(stream)
    for sample in stream.result.samples:
        assert sample.pieces == tuple(piece for piece in pieces if piece.index == sample.index)


def test_all_samples_are_queued_or_none(deployment: Deployment, client: Client) -> None:
    with client.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="x/1") as other:
        next(other)
        with pytest.raises(AlreadyExistsError, match="'x/1' is running"):
            client.generate(PROMPT, SamplingParams(n=3), request_id="x")
        assert deployment.look(lambda scheduler: len(scheduler.rows) + len(scheduler.waiting)) == 1
    wait_until_idle(deployment)


@pytest.mark.parametrize(("n", "message"), [(0, "n is 0; must be at least 1"), (129, "n is 129; must be at most 128")])
def test_how_many_samples_there_may_be(n: int, message: str, client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        client.generate(PROMPT, SamplingParams(n=n))


# Seeds


def test_unseeded_requests_differ_and_a_seed_is_one_text_alone_and_in_a_batch(client: Client) -> None:
    def text(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
        return client.generate(PROMPT, params).token_ids

    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(text, [None] * 20))) == 20
        alone = text(42)
        together = list(pool.map(text, [None, 1, 42, 2, None, 42, 3, None]))
    assert together[2] == together[5] == alone


# Prompt


def test_echo_sends_the_prompt_back(client: Client, tiny_folder: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tiny_folder / "tokenizer.json")).encode(PROMPT).ids
    echoed = client.generate(PROMPT, SamplingParams(max_tokens=4, echo=True, n=2))
    assert echoed.prompt is not None
    assert echoed.prompt.text == PROMPT
    assert list(echoed.prompt.token_ids) == ids
    assert echoed.text == client.generate(PROMPT, SamplingParams(max_tokens=4)).text
    assert client.generate(PROMPT, SamplingParams(max_tokens=4)).prompt is None


def test_an_echo_has_the_special_tokens_of_the_prompt(client: Client) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>"
    echoed = client.generate(prompt, SamplingParams(max_tokens=1, echo=True))
    assert echoed.prompt is not None
    assert echoed.prompt.text == prompt
    assert client.generate(echoed.prompt.token_ids, SamplingParams(max_tokens=1, echo=True)).prompt == echoed.prompt


@pytest.mark.parametrize("draft_length", [0, 4])
def test_no_tokens_beside_an_echo_or_scores_are_a_prompt_alone(
    deployment: Deployment, client: Client, draft_length: int
) -> None:
    """Beside others, in chunks, for several samples, and where there is no room for a token."""
    ids = [int(random.Random(1).randrange(4, 260)) for _ in range(MAX_LEN)]
    other = SamplingParams(max_tokens=100, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(client.generate, PROMPT, other)
        for prompt in (PROMPT, ids, [5]):
            wanted = SamplingParams(max_tokens=0, prompt_logprobs=1, draft_length=draft_length, n=2)
            scored = client.generate(prompt, wanted)
            assert scored.prompt is not None
            assert [sample.token_ids for sample in scored.samples] == [(), ()]
            assert {sample.finish_reason for sample in scored.samples} == {"length"}
            assert (scored.usage.completion_tokens, scored.usage.rounds, scored.usage.drafted) == (0, 0, 0)
            assert scored.usage.prompt_tokens == len(scored.prompt.token_ids)
            echoed = client.generate(prompt, SamplingParams(max_tokens=0, echo=True))
            assert echoed.prompt is not None
            assert echoed.prompt.text == scored.prompt.text
            if len(scored.prompt.token_ids) < MAX_LEN:
                written = client.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
                assert written.prompt is not None
                assert [each and each.logprob for each in scored.prompt.logprobs] == pytest.approx(
                    [each and each.logprob for each in written.prompt.logprobs], abs=1e-3
                )
        assert beside.result().token_ids == client.generate(PROMPT, other).token_ids
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0; must be at least 1, or beside echo"):
        client.generate(PROMPT, SamplingParams(max_tokens=0))
    wait_until_idle(deployment)


# Log probabilities


def law_after(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Hugging Face's log softmax after each token, f32[tokens, vocab]."""
    with torch.inference_mode():
        return load_reference(folder)(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def assert_of(law: torch.Tensor, token_id: int, found: TokenLogprobs | None, count: int) -> None:
    assert found is not None
    assert found.logprob == pytest.approx(float(law[token_id]), abs=1e-3)
    top = law.topk(count)
    assert [token for token, _ in found.top] == top.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(top.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("drafts", ["none", "self", "layers", "other"])
def test_logprobs_are_hugging_faces_with_and_without_speculation(
    drafts: str, tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, other_draft: LoadedModel
) -> None:
    draft = {"none": (), "self": (tiny_target,), "layers": (tiny_draft,), "other": (other_draft,)}[drafts]
    with Deployment(tiny_folder, tiny_target, draft) as deployment, deployment.client() as client:
        prompt = list(client.generate(PROMPT, SamplingParams(max_tokens=1, echo=True)).prompt.token_ids)
        for rule, temperature in (("match", 0.0), ("match", 1.0), ("ratio", 1.0), ("block", 1.0)):
            params = SamplingParams(
                max_tokens=24, temperature=temperature, acceptance=rule, ignore_eos=True, logprobs=3, seed=1, top_k=50,
                frequency_penalty=0.5,
            )  # fmt: skip
            answer = client.generate(PROMPT, params)
            laws = law_after(tiny_folder, [*prompt, *answer.token_ids])[len(prompt) - 1 :]
            tokens = [token for piece in answer.pieces for token in piece.tokens]
            assert len(tokens) == len(answer.logprobs) == 24
            for law, token in zip(laws, tokens, strict=False):
                assert_of(law, token.id, token.logprobs, 3)
        wait_until_idle(deployment)


def test_rows_that_do_not_ask_get_none_beside_rows_that_do(client: Client) -> None:
    def generate(logprobs: int | None) -> Completion:
        return client.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=logprobs))

    with ThreadPoolExecutor(4) as pool:
        plain, own, top, none = pool.map(generate, [None, 0, 2, None])
    assert plain.token_ids == own.token_ids == top.token_ids == none.token_ids
    assert plain.logprobs == none.logprobs == ()
    assert own.logprobs == pytest.approx(top.logprobs, abs=1e-3)
    for answer, count in ((own, 0), (top, 2)):
        tops = [token.logprobs.top for piece in answer.pieces for token in piece.tokens if token.logprobs is not None]
        assert [len(each) for each in tops] == [count] * 20


@pytest.mark.parametrize("draft_length", [0, 8])
def test_text_ids_and_logprobs_end_together_at_a_stop_text(
    draft_length: int, tiny_folder: Path, tiny_target: LoadedModel
) -> None:
    """The target drafts for itself: the stop text lies inside an accepted run, over several tokens of it."""
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:

        def generate(**fields: Any) -> Completion:
            return client.generate(
                PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, draft_length=draft_length, logprobs=1, **fields)
            )

        whole = generate()
        for begin in range(3, 16):
            stop = whole.text[begin : begin + 5]
            answer = generate(stop=(stop,))
            end = whole.text.index(stop)
            assert answer.text == whole.text[:end]
            assert answer.finish_reason == "stop"
            assert len(answer.logprobs) == len(answer.token_ids) == answer.usage.completion_tokens
            assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
            assert answer.logprobs == pytest.approx(whole.logprobs[: len(answer.token_ids)], abs=1e-3)
            tokens = [token for piece in whole.pieces for token in piece.tokens]
            assert len("".join(token.text for token in tokens[: len(answer.token_ids)])) >= end
            if answer.token_ids:  # the last token is part of the text
                assert len("".join(token.text for token in tokens[: len(answer.token_ids) - 1])) <= end
        wait_until_idle(deployment)


def test_nothing_follows_an_end_token_inside_an_accepted_run(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:
        whole = client.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0))
        for place in range(1, 12):
            stop = whole.token_ids[place]
            answer = client.generate(
                PROMPT,
                SamplingParams(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True, logprobs=0, draft_length=8),
            )
            kept = whole.token_ids.index(stop) + 1
            assert answer.token_ids == whole.token_ids[:kept]
            assert answer.logprobs == pytest.approx(whole.logprobs[:kept], abs=1e-3)
            assert answer.usage.completion_tokens == kept


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_the_models_own_end_token_inside_an_accepted_run(
    rule: Any, tiny_folder: Path, tiny_target: LoadedModel
) -> None:
    """It is certain from the sixth token on, and the draft, which is the target, goes on behind it."""
    params = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        min_tokens=5,
        logit_bias={EOS_ID: 90.0},
        draft_length=8,
        acceptance=rule,
        logprobs=0,
    )
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:
        answer = client.generate(PROMPT, params)
        assert answer.token_ids.index(EOS_ID) == 5 == len(answer.token_ids) - 1
        assert answer.finish_reason == "stop"
        assert len(answer.logprobs) == answer.usage.completion_tokens == 6
        assert "<|im_end|>" not in answer.text
        wait_until_idle(deployment)


def test_prompt_logprobs_are_hugging_faces_and_come_once(
    deployment: Deployment, client: Client, tiny_folder: Path
) -> None:
    """With a prompt that is in the prefix cache, and for several samples."""
    for prompt in (PROMPT, PROMPT * 9):
        plain = client.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True, echo=True))
        scored = client.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=2, n=2))
        assert scored.token_ids == plain.token_ids
        assert scored.usage.cached_tokens == 0
        assert scored.prompt is not None
        assert plain.prompt is not None
        assert (scored.prompt.token_ids, scored.prompt.text) == (plain.prompt.token_ids, prompt)
        assert plain.prompt.logprobs == ()
        assert scored.logprobs == ()
        first, *others = scored.prompt.logprobs
        assert first is None
        laws = law_after(tiny_folder, list(scored.prompt.token_ids))
        for law, token_id, found in zip(laws, scored.prompt.token_ids[1:], others, strict=False):
            assert_of(law, token_id, found, 2)
        assert len(others) == len(scored.prompt.token_ids) - 1
    wait_until_idle(deployment)


def test_a_prompt_of_one_token_has_nothing_to_score(client: Client) -> None:
    answer = client.generate([5], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert answer.prompt is not None
    assert answer.prompt.token_ids == (5,)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_how_many_logprobs_there_may_be(field: str, value: int, client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{field} is {value}; must be in \[0, 20\]"):
        client.generate(PROMPT, SamplingParams(**{field: value}))


# Speculation


def test_a_request_chooses_its_drafter_by_name_or_scheme(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel
) -> None:
    """One replica agrees with the target always, another of a scheme of its own does not always."""
    other = ModelDrafter(tiny_draft, pages=256)
    other.scheme = "layers"
    with Deployment(tiny_folder, tiny_target, (tiny_target, other)) as deployment, deployment.client() as client:

        def generate(draft_model: str) -> Completion:
            params = SamplingParams(max_tokens=30, ignore_eos=True, draft_length=4, draft_model=draft_model)
            return client.generate(PROMPT, params)

        perfect = [generate(name).usage for name in ("tiny", "model")]
        assert all(usage.accepted == usage.drafted > 0 for usage in perfect)
        failing = [generate(name) for name in ("tiny-draft", "layers")]
        assert all(0 < answer.usage.accepted < answer.usage.drafted for answer in failing)
        assert generate("tiny").token_ids == failing[0].token_ids
        with pytest.raises(InvalidArgumentError, match=r"draft_model is 'mtp'; this server has tiny \(model\), "):
            generate("mtp")
        deployment.call(deployment.drafts[1].stop())
        assert eventually(lambda: client.server_info().draft_replica_count == 1)
        away = generate("layers")  # which may come back: it is waited for without a draft
        assert away.token_ids == failing[0].token_ids
        assert away.usage.drafted == 0
        wait_until_idle(deployment)


def test_without_a_draft_there_is_none_to_choose(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with (
        Deployment(tiny_folder, tiny_target) as deployment,
        deployment.client() as client,
        pytest.raises(InvalidArgumentError, match="draft_model is 'mtp'; this server has no draft"),
    ):
        client.generate(PROMPT, SamplingParams(draft_model="mtp"))


def test_speculation_is_off_fixed_or_the_servers_choice(deployment: Deployment, client: Client) -> None:
    def generate(**fields: Any) -> Completion:
        return client.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, **fields))

    off, fixed, auto = generate(draft_length=0), generate(draft_length=2), generate(adaptive_draft_length=True)
    assert off.token_ids == fixed.token_ids == auto.token_ids
    assert off.usage.drafted == 0
    assert max(piece.drafted for piece in fixed.pieces) == 2
    with client.stream(PROMPT, SamplingParams(max_tokens=200, adaptive_draft_length=True, ignore_eos=True)) as stream:
        next(stream)
        assert deployment.look(lambda scheduler: scheduler.is_adaptive)
    with pytest.raises(InvalidArgumentError, match="draft_length is 2; leave it out, or adaptive_draft_length"):
        generate(draft_length=2, adaptive_draft_length=True)
    wait_until_idle(deployment)


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_pieces_show_the_proposals_that_they_came_of(rule: Any, client: Client) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=1.0, seed=4, ignore_eos=True, draft_length=4, acceptance=rule, show_proposals=True
    )
    answer = client.generate(PROMPT, params)
    shown = 0
    for piece in answer.pieces:
        if piece.proposal is None:
            assert piece.drafted == 0
            continue
        shown += 1
        proposal = piece.proposal
        assert proposal.parents == tuple(range(-1, len(proposal.token_ids) - 1))
        assert proposal.accepted == tuple(range(piece.accepted))
        assert piece.accepted == piece.kinds.count("accepted")
        kept = tuple(proposal.token_ids[node] for node in proposal.accepted)
        assert piece.token_ids[: len(kept)] == kept
        assert len(piece.token_ids) <= len(kept) + 1
    assert shown > 0
    plain = client.generate(PROMPT, SamplingParams(max_tokens=30, draft_length=4))
    assert all(piece.proposal is None for piece in plain.pieces)


# Priority and deadline


def test_priority_reaches_the_scheduler(deployment: Deployment, client: Client) -> None:
    with client.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), priority=-3) as stream:
        next(stream)
        assert deployment.look(lambda scheduler: [row.priority for row in scheduler.rows]) == [-3]
    wait_until_idle(deployment)


def test_a_request_past_its_deadline_ends_and_releases_everything(deployment: Deployment) -> None:
    sampling = pb.SamplingParams(max_tokens=400, ignore_eos=True, n=2)
    with pytest.raises(DeadlineExceededError, match=r"request 'slow' did not end within its timeout_s of 0\.05"):
        call(deployment.address, sampling=sampling, timeout_s=0.05, request_id="slow")
    wait_until_idle(deployment)


def test_a_request_that_waits_has_its_deadline_too(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with Deployment(tiny_folder, tiny_target, max_rows=1) as deployment, deployment.client() as client:
        with client.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)) as first:
            next(first)
            with pytest.raises(DeadlineExceededError, match="timeout_s"):
                call(deployment.address, timeout_s=0.02)
            next(first)
        wait_until_idle(deployment)


def test_a_deadline_in_time_changes_nothing(deployment: Deployment, client: Client) -> None:
    events = call(deployment.address, sampling=pb.SamplingParams(max_tokens=8), timeout_s=600)
    text = "".join(text for event in events for text in event.piece.token_texts)
    assert text == client.generate(PROMPT, SamplingParams(max_tokens=8)).text


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e9])
def test_what_is_no_deadline_is_refused(timeout_s: float, deployment: Deployment) -> None:
    with pytest.raises(InvalidArgumentError, match=r"timeout_s is .*; must be in \(0, 604800\]"):
        call(deployment.address, timeout_s=timeout_s)


# Ends inside a round


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("draft_length", [0, 2, 4, 8])
def test_a_run_ends_at_its_stop_token_or_budget_and_nothing_follows(
    rule: Any, draft_length: int, tiny_folder: Path, tiny_target: LoadedModel
) -> None:
    """The target drafts for itself, so that runs of draft_length + 1 are accepted, with the end inside."""
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:

        def generate(**fields: Any) -> Any:
            return client.generate(PROMPT, SamplingParams(draft_length=draft_length, acceptance=rule, **fields))

        whole = generate(max_tokens=24, ignore_eos=True).token_ids
        place = next(at for at in range(2, 24) if whole.index(whole[at]) == at)  # a token that is new there
        for budget in (place + 1, place + 2, place + 3):
            stopped = generate(max_tokens=budget, ignore_eos=True, stop_token_ids=(whole[place],))
            assert stopped.token_ids == whole[: place + 1]
            assert stopped.finish_reason == "stop"  # on the last place that the budget allows too
            assert stopped.usage.completion_tokens == place + 1
        for budget in range(1, 12):
            cut = generate(max_tokens=budget, ignore_eos=True)
            assert cut.token_ids == whole[:budget]
            assert cut.finish_reason == "length"
        wait_until_idle(deployment)


@pytest.mark.parametrize("drafts_well", [False, True])
def test_a_prompt_that_repeats_itself_changes_no_text(
    drafts_well: bool, tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel
) -> None:
    """Whatever is drafted after 48 times the same word, rejected or kept, the text is Hugging Face's."""
    prompt = "serving " * 48
    expected = greedy_texts(tiny_folder, [prompt], 40)[prompt]
    draft = tiny_target if drafts_well else tiny_draft
    with Deployment(tiny_folder, tiny_target, (draft,)) as deployment, deployment.client() as client:
        for draft_length in (0, 1, 4, 16):
            done = client.generate(prompt, SamplingParams(max_tokens=40, draft_length=draft_length))
            assert done.token_ids == expected, f"{draft_length} draft tokens"
            assert not drafts_well or bool(done.usage.accepted) == (draft_length > 0)


# Ends of contexts


@pytest.mark.parametrize("pages", [128, 34])
def test_prompts_up_to_the_end_of_the_context(pages: int, tiny_folder: Path, tiny_target: LoadedModel) -> None:
    """Of max_len - j tokens, for every j that a proposal reaches; with 34 pages there is room for one at a time."""
    draft_length, generator = 4, random.Random(1)
    prompt = [generator.randrange(4, 280) for _ in range(MAX_LEN)]
    with Deployment(tiny_folder, tiny_target, (tiny_target,), pages=pages) as deployment:
        with deployment.client() as client, ThreadPoolExecutor(2) as pool:

            def generate(j: int, length: int = draft_length) -> tuple[int, ...]:
                params = SamplingParams(max_tokens=j, ignore_eos=True, draft_length=length)
                return client.generate(prompt[: MAX_LEN - j], params).token_ids

            with pytest.raises(InvalidArgumentError, match="prompt is 512 tokens; at most 511 fit"):
                client.generate(prompt)
            reaches = range(1, draft_length + 3)
            plain = {j: generate(j, 0) for j in reaches}
            assert [len(plain[j]) for j in reaches] == list(reaches)
            for j, text in zip([*reaches, *reaches], pool.map(generate, [*reaches, *reaches]), strict=True):
                assert text == plain[j]
            with pytest.raises(InvalidArgumentError, match="max_tokens is 6; at most 5 fit after a prompt of 507"):
                client.generate(prompt[: MAX_LEN - 5], SamplingParams(max_tokens=6))
        wait_until_idle(deployment)


def test_rows_that_fill_their_context_after_a_preemption(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    """Two rows that come together and grow to the very end, in pages for little more than one."""
    generator = random.Random(2)
    prompt = [generator.randrange(4, 280) for _ in range(MAX_LEN - 60)]
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True, draft_length=4, n=2)
    with Deployment(tiny_folder, tiny_target) as deployment, deployment.client() as client:
        plain = client.generate(prompt, params)
    with Deployment(tiny_folder, tiny_target, (tiny_target,), pages=118, page_size=8) as deployment:
        with deployment.client() as client:
            narrow = client.generate(prompt, params)
        assert [sample.token_ids for sample in narrow.samples] == [sample.token_ids for sample in plain.samples]
        assert sum(sample.usage.preemptions for sample in narrow.samples) > 0
        wait_until_idle(deployment)


def test_a_draft_with_a_shorter_context_drafts_as_far_as_it_reaches(
    tiny_folder: Path, tiny_target: LoadedModel
) -> None:
    short = ModelDrafter(tiny_target, pages=256, max_len=96)
    params = SamplingParams(max_tokens=120, ignore_eos=True, draft_length=4)
    with Deployment(tiny_folder, tiny_target) as deployment, deployment.client() as client:
        plain = client.generate(PROMPT, params).token_ids
    with Deployment(tiny_folder, tiny_target, (short,)) as deployment, deployment.client() as client:
        answer = client.generate(PROMPT, params)
        assert answer.token_ids == plain
        reached, drafted = answer.usage.prompt_tokens, []
        for piece in answer.pieces:
            drafted.append((reached, piece.drafted))
            reached += len(piece.tokens)
        assert any(count for at, count in drafted if at < 80)
        assert not any(count for at, count in drafted if at > 96)
        longer = client.generate(PROMPT * 4, SamplingParams(max_tokens=10, ignore_eos=True))
        assert longer.usage.drafted == 0
        wait_until_idle(deployment)


# Leaving


def test_a_disconnect_at_any_token_frees_the_row_in_every_pool(deployment: Deployment, client: Client) -> None:
    generator = random.Random(3)

    def leave(_: int) -> None:
        n, after = generator.choice([1, 1, 3]), generator.randrange(0, 30)
        with client.stream(PROMPT, SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True, n=n)) as stream:
            for _ in range(after):
                next(stream)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(16)))
    wait_until_idle(deployment)


# Capabilities


def test_a_deployment_of_models_honours_every_field(client: Client) -> None:
    found = client.capabilities()
    assert [field.name for field in found.fields if not field.honoured] == []
    assert [(each.model, each.scheme, each.replica_count) for each in found.drafters] == [("tiny-draft", "model", 1)]
    assert found.drafters[0].acceptance_rules == ("match", "ratio", "block")
    assert next(field for field in found.fields if field.name == "draft_length").default == "4"
