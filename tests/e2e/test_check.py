"""``pilotfish check`` against whole deployments: sound ones pass, and ones with a fault planted do not."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_findings import failed_names, failures, findings
from deployment import Deployment
from drafts import drafting, load_head
from safetensors.torch import load_file, save_file
from tiny_heads import FORMATS

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.model import ModelDrafter
from orchestrator.core import target_steps
from orchestrator.core.acceptance import Verdict
from orchestrator.loop import Loop
from pilotfish import AsyncClient, noise
from pilotfish.check import fields as fields_module
from pilotfish.check import law as law_module
from pilotfish.check.asking import Asker
from pilotfish.check.checks import CHECKS, Check, chosen
from pilotfish.check.rehearsal import Silent, forecast
from pilotfish.check.results import EVERY_ANSWER
from pilotfish.check.run import Run
from pilotfish.check.setting import LABORATORY, Setting
from pilotfish.client import results as results_module
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.runtime.shaping import Shaper
from pilotfish.steps import DraftStep


@contextmanager
def serving(folder: Path, target: LoadedModel, *drafts: LoadedModel | Drafter, **settings: Any) -> Iterator[Deployment]:
    with Deployment(folder, target, drafts, max_rows=32, **settings) as deployment:
        yield deployment
        deployment.check_pools()


def some_cases(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the check of fields try just these."""
    every = fields_module.cases
    monkeypatch.setattr(fields_module, "cases", lambda seen: [case for case in every(seen) if case.name in names])


def some_laws(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the check of the law try just these."""
    every = law_module.cases()
    monkeypatch.setattr(law_module, "cases", lambda: {name: every[name] for name in names})


def test_a_sound_deployment_passes(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check; of law and fields, which ask most, a part."""
    some_laws([f"temperature 1 × {way}" for way in ("speculation off", "ratio", "block", "no seed")], monkeypatch)
    some_cases(["top_p", "min_tokens", "all together"], monkeypatch)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, plenty=4.0)
    assert [result for result in results if result.status == "failed"] == []
    assert {result.name for result in results if result.status == "skipped"} == {"ignore_eos", "all"}
    assert {result.check for result in results if result.name == "all"} == {LABORATORY}
    assert {result.check for result in results} == {*(each.name for each in CHECKS), EVERY_ANSWER}


def test_what_a_rehearsal_foresees_is_what_is_asked(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel
) -> None:
    async def count(address: str, check: Check) -> tuple[float, int]:
        async with AsyncClient(address) as client:
            asker = Asker(client, await client.server_info(), await client.capabilities(), Setting(), Silent())
            least, _ = await forecast(check, asker)
            await Run([check]).find(check, asker, scale=0.0)
            return least.answers, asker.requests

    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        for check in chosen(["seeded", "acceptance", "logprobs", "fields", "mixed", "disconnects"]):
            foreseen, asked = asyncio.run(count(deployment.address, check))
            assert foreseen == asked > 0, check.name


HEADS = [("own", "off"), ("own", "10"), ("eagle3", "10"), ("eagle", "10"), ("medusa", "10")]


@pytest.mark.parametrize(("kind", "tree"), HEADS)
def test_sound_heads_pass(
    kind: str,
    tree: str,
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the law what a head has a part in: without a seed requests get one, and go on as those of a rule do."""
    some_laws(["temperature 1 × ratio", "temperature 1 × block"], monkeypatch)
    with drafting(kind, tiny_folder, tiny_target, tmp_path, draft_tree=tree, max_rows=32) as deployment:
        results = findings(deployment, "greedy", "logprobs", "law")
        deployment.check_pools()
    assert [result for result in results if result.status == "failed"] == []


def test_each_of_several_kinds_of_drafters_is_asked(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, tmp_path: Path
) -> None:
    head = load_head(FORMATS["own"].write(tmp_path / "own"), tiny_folder)
    with serving(tiny_folder, tiny_target, tiny_draft, head, features=head.info.features) as deployment:
        results = findings(deployment, "greedy", "unseeded", "mixed")
    assert [result for result in results if result.status == "failed"] == []
    for drafter in (tiny_draft.model_id, head.info.model_id):
        assert [result for result in results if f"drafted by {drafter} " in result.name]


def test_without_a_draft_it_says_what_it_cannot_check(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with serving(tiny_folder, tiny_target) as deployment:
        results = findings(deployment, "greedy", "fields", "seeded")
    assert failures(results) == set()
    assert [result.check for result in results if result.status == "skipped"] == ["greedy", "fields"]


# Faults


@pytest.fixture(scope="module")
def flat_draft(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target, less sure of itself, as small drafts are: its logits halved."""
    folder = tmp_path_factory.mktemp("flat") / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["lm_head.weight"] / 2}, folder / "model.safetensors", {"format": "pt"}
    )
    return load_model(folder, dtype="float32", name="flat")


class Lying(ModelDrafter):
    """Reports a flatter q than it drew from."""

    def propose(self, step: DraftStep) -> Proposals:
        proposals = super().propose(step)
        if not len(proposals.support_probs):
            return proposals
        flat = np.sqrt(proposals.support_probs)
        owners = np.repeat(np.arange(len(proposals.supports.counts)), proposals.supports.counts)
        totals = np.bincount(owners, flat, minlength=len(proposals.supports.counts))
        return replace(proposals, support_probs=(flat / totals[owners]).astype(np.float32))


def test_a_flat_draft_is_as_sound_as_any(
    tiny_folder: Path, tiny_target: LoadedModel, flat_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_laws([name for name in law_module.cases() if "speculation off" not in name], monkeypatch)
    with serving(tiny_folder, tiny_target, flat_draft) as deployment:
        assert failed_names(findings(deployment, "law")) == set()


def test_a_wrong_q_is_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_laws(["temperature 1 × match", "temperature 1 × ratio"], monkeypatch)
    with serving(tiny_folder, tiny_target, Lying(tiny_draft, pages=256)) as deployment:
        failed = failed_names(findings(deployment, "law", "greedy", plenty=25.0))
    assert "temperature 1 × ratio, all tokens by rank" in failed
    assert all("ratio" in name for name in failed)  # the others take no q


def test_penalties_on_bonus_tokens_only_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Shaper.__call__

    def last_only(shaper: Shaper, logits: Any, rows: Any, path: Any) -> Any:
        is_last = np.append(rows[1:] != rows[:-1], True)
        return whole(shaper, logits, np.where(is_last, rows, -1), path)

    monkeypatch.setattr(Shaper, "__call__", last_only)
    some_cases(["frequency_penalty"], monkeypatch)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "fields")
    assert failures(results) == {"fields"}
    [found] = [result for result in results if result.name == "frequency_penalty × match"]
    assert "(accepted) instead of" in found.why or "(recovered) instead of" in found.why


def test_penalties_that_do_nothing_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speculation and without: nothing differs, but the log probabilities tell."""
    monkeypatch.setattr(Shaper, "__call__", lambda shaper, logits, rows, path: np.zeros(0, np.int64))
    some_cases(["presence_penalty"], monkeypatch)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "fields")
    assert failed_names(results) == {"presence_penalty is heeded"}


def test_seeds_that_requests_share_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.admission.secrets.randbits", lambda bits: 7)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "unseeded")
    assert failures(results) == {"unseeded"}
    assert "requests 1 and 2 begin with the same 12 tokens (and 189 more)" in {result.why for result in results}


def test_rows_of_a_batch_that_take_one_another_s_seed_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(seeds: Any, purpose: noise.Purpose, rounds: Any, positions: Any) -> Any:
        return noise.keys(np.full_like(seeds, seeds[0]) if len(seeds) else seeds, purpose, rounds, positions)

    monkeypatch.setattr("pilotfish.runtime.sampling.draw_keys", first)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "mixed")
    assert failures(results) == {"mixed"}


def test_rows_that_nobody_reads_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is fine is then a quarter of the time that a row takes to the end of its context, at the speed found.
    monkeypatch.setattr("pilotfish.check.disconnects._ALWAYS_FINE_S", 0.0)
    monkeypatch.setattr("pilotfish.check.disconnects._FEWEST_VISITS", 4)
    monkeypatch.setattr(Loop, "cancel", lambda loop, request: None)
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), max_rows=1) as deployment:
        results = findings(deployment, "disconnects")
    assert "a place is free at once" in failed_names(results)


def test_a_wrong_token_behind_accepted_ones_is_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = target_steps.match_chains

    def wrong(proposals: Any, draws: Any) -> list[Verdict]:
        verdicts = judged(proposals, draws)
        return [each._replace(token=max(each.token - len(each.path) // 2, 0)) for each in verdicts]

    monkeypatch.setattr(target_steps, "match_chains", wrong)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "greedy", scale=1.0)
    failed = failed_names(results)  # where two draft tokens were kept in a round, which depends on when drafts come
    assert failed & {"draft_length 4", "draft_length 64"}
    assert "draft_length 1" not in failed
    assert any("instead of" in result.why for result in results)


def test_answers_that_a_check_cannot_read_fail_it_and_no_other(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "_logprobs_from_pb", lambda tokens: ())
    some_cases(["top_k"], monkeypatch)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        results = findings(deployment, "fields", "disconnects")
    assert "the check could not go on" in next(each.why for each in results if each.name == "answers")
    assert failures(results) == {"fields", EVERY_ANSWER}
    assert "disconnects" in {result.check for result in results}


def test_log_probabilities_of_zero_are_found(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of accepted tokens."""
    read = results_module._piece_from_pb

    def zeroed(piece: Any) -> Any:
        for kind, logprobs in zip(piece.kinds, piece.logprobs, strict=False):
            logprobs.logprob = 0.0 if kind == 1 else logprobs.logprob
        return read(piece)

    monkeypatch.setattr(results_module, "_piece_from_pb", zeroed)
    with serving(tiny_folder, tiny_target, tiny_draft) as deployment:
        failed = failed_names(findings(deployment, "logprobs"))
    assert {"draft_length 4", "is sound by itself"} <= failed
