"""Deployments of simulated workers: real services, exact texts, and a stale slot that does not go unnoticed."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment
from simulated import greedy, instant, model

from draft_svc.drafters.simulated import SimulatedDrafter
from orchestrator.core.acceptance import Rule
from pilotfish import Completion, FailedPreconditionError, InvalidArgumentError, SamplingParams
from pilotfish.tokenizer_hash import tokenizer_hash
from target_svc.simulated import SimulatedTarget

PROMPT = [30, 40, 50, 60, 70]


def deploy(folder: Path, replicas: int = 1, agreement: float = 0.75, pages: int = 256) -> Deployment:
    profile, described = instant(agreement), model(tokenizer_hash(folder))
    drafts = tuple(SimulatedDrafter(profile, described, pages=pages) for _ in range(replicas))
    return Deployment(folder, lambda: SimulatedTarget(profile, described, pages=pages), drafts, pages=pages)


def ask(deployment: Deployment, prompt: list[int], **params: object) -> Completion:
    with deployment.client() as client:
        return client.generate(prompt, SamplingParams(ignore_eos=True, **params))  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_length", [0, 1, 4, 9])
def test_the_text_is_the_targets_own_whatever_is_drafted(tiny_folder: Path, draft_length: int) -> None:
    with deploy(tiny_folder) as deployment:
        completion = ask(deployment, PROMPT, max_tokens=60, draft_length=draft_length)
        assert list(completion.token_ids) == greedy(PROMPT, 60)
        deployment.check_pools()
    assert (completion.usage.accepted > 20) == (draft_length > 0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_rows_that_share_batches_pages_and_replicas(
    tiny_folder: Path, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[20 + row % 3, *PROMPT, *range(20, 20 + row)] for row in range(48)]
    with deploy(tiny_folder, replicas, pages=180) as deployment, ThreadPoolExecutor(48) as threads:
        found = list(threads.map(lambda prompt: ask(deployment, prompt, max_tokens=40), prompts))
        deployment.check_pools()
    assert [list(completion.token_ids) for completion in found] == [greedy(prompt, 40) for prompt in prompts]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_seed_gives_the_same_text_with_and_without_a_draft(tiny_folder: Path) -> None:
    params = {"max_tokens": 40, "temperature": 1.0, "top_p": 0.9, "seed": 11}
    with deploy(tiny_folder) as deployment:
        texts = {ask(deployment, PROMPT, draft_length=length, **params).token_ids for length in (0, 3, 7)}
        other = ask(deployment, PROMPT, **(params | {"seed": 12})).token_ids
    assert len(texts) == 1
    assert other not in texts


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_sampled_drafts_are_kept_as_often_as_they_agree(tiny_folder: Path, rule: Rule, agreement: float) -> None:
    with deploy(tiny_folder, agreement=agreement) as deployment:
        name = rule.name.lower()
        completion = ask(deployment, PROMPT, max_tokens=300, temperature=1.0, seed=5, acceptance=name, draft_length=1)
    usage = completion.usage
    assert usage.accepted / usage.drafted == pytest.approx(agreement, abs=0.1)


def test_a_stale_slot_ends_the_stream_and_the_row_is_prefilled_again(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines: list[SimulatedTarget] = []

    def make() -> SimulatedTarget:
        engines.append(SimulatedTarget(instant(0.75), model(tokenizer_hash(tiny_folder)), pages=64))
        return engines[-1]

    with Deployment(tiny_folder, make, pages=64) as deployment, deployment.client() as client:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with client.stream(PROMPT, params) as stream:
            next(iter(stream))
            marks = engines[0]._pages._marks
            marks[np.flatnonzero(marks)[3]] += 1
            list(stream)
        deployment.check_pools()
    assert list(stream.result.token_ids) == greedy(PROMPT, 200)
    assert any("as its token 3" in record.message for record in caplog.records)


def test_what_needs_logits_is_refused_by_name(tiny_folder: Path) -> None:
    with deploy(tiny_folder) as deployment:
        with pytest.raises(InvalidArgumentError, match="frequency_penalty, logit_bias is given; target "):
            ask(deployment, PROMPT, frequency_penalty=1.0, logit_bias={5: 1.0})
        with deployment.client() as client, pytest.raises(FailedPreconditionError, match="follows no grammars"):
            client.generate(PROMPT, SamplingParams(json_object=True))
        assert ask(deployment, PROMPT, max_tokens=3).token_ids
        deployment.check_pools()
