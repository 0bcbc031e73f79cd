"""Drafters on the target's features through the real services: a head that checks every pair it is ever fed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from oracle_head import OracleHead
from tiny_models import greedy_texts

from pilotfish import SamplingParams
from pilotfish.errors import FailedPreconditionError
from pilotfish.runtime.loading import LoadedModel
from pilotfish.steps import Grant, Ints, TargetResult, TargetStep
from target_svc.engine import TargetEngine

FEATURES = ("hidden.0", "hidden.2", "final")
PROMPTS = ["A pilot fish swims ahead. ", "a", "Once upon a time there was a small fish, " * 4, "def f(x):\n"]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


class PatientTarget(TargetEngine):
    """Computes nothing while features are on their way to the head: that catches up then, however slow it is."""

    def __init__(self, model: LoadedModel, head: OracleHead) -> None:
        super().__init__(model, pages=256, features=FEATURES)
        self._head_has_run = head.has_run

    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        assert self._head_has_run.wait(60)
        return super().run(grant, step)


def hold_target_while_read(deployment: Deployment, head: OracleHead) -> None:
    """Of one row at a time, as another's proposal would end the wait."""
    loop = deployment.orchestrator.loop
    read_features = loop._read_features

    async def read(grant: Grant, slots: Ints) -> Any:
        head.has_run.clear()
        return await read_features(grant, slots)

    head.has_run.set()  # nothing is on its way yet
    loop._read_features = read


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> dict[str, tuple[int, ...]]:
    """What Hugging Face writes, greedily, whatever its end token."""
    return greedy_texts(tiny_folder, PROMPTS, 120, eos_token_id=None, pad_token_id=3)


@pytest.mark.parametrize("tree", ["off", 12])
@pytest.mark.parametrize("spoil", [0, 3])
def test_every_pair_is_true_and_texts_are_the_targets_own(
    spoil: int, tree: str | int, tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    head = OracleHead(tiny_folder, tiny_target, spoil=spoil)
    with Deployment(tiny_folder, tiny_target, (head,), features=FEATURES, draft_tree=tree) as deployment:
        with deployment.client() as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
            completions = list(threads.map(lambda prompt: client.generate(prompt, LONG), PROMPTS * 2))
        for prompt, completion in zip(PROMPTS * 2, completions, strict=True):
            assert completion.token_ids == reference[prompt][:40]
            assert completion.usage.accepted > 0
            assert completion.usage.round_total.feature_bytes > 0
            if not spoil:
                assert completion.usage.accepted == completion.usage.drafted
        assert head.held > head.fed > 0
        deployment.check_pools()


def test_seeded_texts_do_not_depend_on_what_a_head_drafts(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    head = OracleHead(tiny_folder, tiny_target)
    deployed = Deployment(tiny_folder, lambda: PatientTarget(tiny_target, head), (head,), draft_tree=10)
    with deployed as deployment, deployment.client() as client:
        hold_target_while_read(deployment, head)
        for seed, prompt in enumerate(PROMPTS):
            texts = set()
            for length in (0, 2, 5):
                params = SamplingParams(max_tokens=60, temperature=0.6, seed=seed, draft_length=length, ignore_eos=True)
                completion = client.generate(prompt, params)
                texts.add(completion.token_ids)
                assert (completion.usage.accepted > 0) == (length > 0)
                assert length or not completion.usage.drafted
            assert len(texts) == 1


def test_a_replica_that_joins_in_the_middle_of_a_request_drafts_as_one_that_was_there(
    tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    head, prompt = OracleHead(tiny_folder, tiny_target), PROMPTS[2]
    joined = threading.Event()

    class LonelyTarget(PatientTarget):
        """Computes a few tokens alone, and no more until the head is there."""

        alone = 4

        def run(self, grant: Grant, step: TargetStep) -> TargetResult:
            self.alone -= 1
            assert self.alone >= 0 or joined.wait(60)
            return super().run(grant, step)

    with Deployment(tiny_folder, lambda: LonelyTarget(tiny_target, head), (head,)) as deployment:
        hold_target_while_read(deployment, head)
        deployment.call(deployment.drafts[0].stop())
        with deployment.client() as client:
            stream = client.stream(prompt, SamplingParams(max_tokens=120, ignore_eos=True))
            pieces = iter(stream)
            for _ in range(3):
                assert next(pieces).drafted == 0
            deployment.call(deployment.start_draft(0, deployment.drafts[0].address))
            while not deployment.look(lambda scheduler: bool(scheduler.drafting.replicas)):
                pass
            joined.set()
            list(pieces)
        usage = stream.result.usage
        assert stream.result.token_ids == reference[prompt]
        assert usage.accepted == usage.drafted > 0
        assert usage.round_total.feature_read_us > 0
        deployment.check_pools()


def test_a_target_and_a_head_that_come_back_go_on(
    tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    heads = tuple(OracleHead(tiny_folder, tiny_target, spoil=5) for _ in range(2))
    with Deployment(tiny_folder, tiny_target, heads, features=FEATURES) as deployment, deployment.client() as client:
        stream = client.stream(PROMPTS[0], SamplingParams(max_tokens=120, ignore_eos=True))
        pieces = iter(stream)
        for worker in (deployment.drafts[0], deployment.target):
            next(pieces)
            deployment.call(worker.stop())
        deployment.call(deployment.start_target(deployment.target.address))
        list(pieces)
        assert stream.result.token_ids == reference[PROMPTS[0]]
        assert stream.result.usage.accepted > 0
        deployment.check_pools()


def test_a_target_that_cannot_be_read_costs_only_proposals(
    tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    head = OracleHead(tiny_folder, tiny_target)
    with Deployment(tiny_folder, tiny_target, (head,), features=FEATURES) as deployment, deployment.client() as client:

        async def fail(*_: object) -> None:
            raise FailedPreconditionError("nothing to be read today")

        deployment.orchestrator.loop._read_features = fail  # type: ignore[assignment]
        assert client.generate(PROMPTS[0], LONG).usage.accepted > 0  # short enough to come with the answers
        completion = client.generate(PROMPTS[2], LONG)
        assert completion.token_ids == reference[PROMPTS[2]][:40]
        assert completion.usage.accepted == 0
        assert "nothing to be read today" in caplog.text
        deployment.check_pools()


def test_a_head_that_the_target_does_not_feed_is_refused_at_the_start(
    tiny_folder: Path, tiny_target: LoadedModel
) -> None:
    deployment = Deployment(
        tiny_folder, tiny_target, (OracleHead(tiny_folder, tiny_target),), features=("final", "hidden.1")
    )
    with pytest.raises(FailedPreconditionError, match=r"start the target with --features final,hidden\.1,hidden\.0"):
        deployment.__enter__()
