"""Simulated models: profiles, laws held against the real sampling code, and pages that notice what is stale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Row, ints, sampling_rows, token_rows
from simulated import IDS, greedy, instant, model, prefix_of

from draft_svc.drafters import create_drafter
from draft_svc.drafters.simulated import SimulatedDrafter
from draft_svc.server import DraftConfig
from pilotfish.errors import InternalError, InvalidArgumentError, NotFoundError, PilotfishError
from pilotfish.noise import Purpose, keys
from pilotfish.runtime import sampling
from pilotfish.runtime.worker_config import WorkerConfig
from pilotfish.simulate import law
from pilotfish.simulate.law import LOGITS, WIDTH, Law
from pilotfish.simulate.pages import HashedPages
from pilotfish.simulate.profile import SHIPPED, Cost, load_profile
from pilotfish.steps import DraftStep, DrawRule, ProposalKind, SamplingRows, Supports, TargetStep
from target_svc.simulated import SimulatedTarget

GOOD = "agreement = 0.5\n[target]\nweights_us = 1\ntoken_us = 2\n[draft]\nweights_us = 3\ntoken_us = 4\n"


# Profiles


def test_shipped_profiles_load_and_are_named_in_the_help() -> None:
    names = [file.stem for file in SHIPPED.glob("*.toml")]
    assert "llama-70b-8xh100" in names
    for name in names:
        profile = load_profile(name)
        assert profile.draft.weights_us < profile.target.weights_us
        assert name in (WorkerConfig.model_fields["simulate"].description or "")


def test_a_profile_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load_profile(str(file)).draft == Cost(weights_us=3, token_us=4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("agreement = ", "is not TOML"),
        (GOOD.replace("0.5", "1.5"), "agreement: .*less than or equal to 1"),
        (GOOD.replace("weights_us = 3", ""), "draft.weights_us: Field required"),
        (GOOD + "speed = 3", "draft.speed: Extra"),
        (GOOD.replace("= 2", "= -2"), "target.token_us: .*greater than or equal to 0"),
        (GOOD.replace("= 2", '= "2"'), "target.token_us: .*valid number"),
    ],
)
def test_a_broken_profile_is_refused_by_name_of_the_key(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=fault):
        load_profile(str(file))


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(NotFoundError, match="'nope'; shipped profiles are llama-70b-8xh100, "):
        load_profile("nope")


def test_settings_that_only_a_model_has_are_refused(tmp_path: Path) -> None:
    config = DraftConfig(model=tmp_path, simulate="nope", layers=3)
    with pytest.raises(PilotfishError, match="layers is given"):
        config.refuse_with_simulate("device", "layers")
    config.refuse_with_simulate("device", "dtype")
    for setting in ({"tree": tmp_path / "tree.json"}, {"target_model": tmp_path}, {"feedback": "pre_norm"}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(setting))} is given, but a simulated worker"):
            create_drafter(DraftConfig.model_validate({"model": tmp_path, "simulate": "nope"} | setting))


def test_a_forward_takes_the_longer_of_weights_and_arithmetic() -> None:
    cost = Cost(weights_us=100, token_us=10, cached_ktoken_us=5)
    assert cost.forward_us(1, 0) == cost.forward_us(10, 0) == 100
    assert cost.forward_us(11, 0) == 110
    assert cost.forward_us(1, 2000) == 110


# Laws


def logits_of(firsts: list[int]) -> torch.Tensor:
    """The same laws as logits over all ids."""
    logits = torch.full((len(firsts), IDS), float("-inf"))
    for row, first in enumerate(firsts):
        for rank in range(WIDTH):
            logits[row, (first + rank) % IDS] = LOGITS[rank]
    return logits


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"temperature": 5.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.71},
    {"temperature": 2.0, "min_p": 0.06},
    {"temperature": 3.0, "top_k": 40, "top_p": 0.83, "min_p": 0.011},
]


def rows_of(settings: list[dict[str, float]]) -> SamplingRows:
    each = [sampling_rows(1, seed=seed, **values) for seed, values in enumerate(settings)]  # type: ignore[arg-type]
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "rounds")
    return SamplingRows(*(np.concatenate([getattr(row, name) for row in each]) for name in names))


def test_laws_are_those_of_the_real_sampling_code() -> None:
    rows, firsts = rows_of(SETTINGS), [IDS - 3 + row for row in range(len(SETTINGS))]
    expected = sampling.probabilities(logits_of([first % IDS for first in firsts]), rows).numpy()
    p = law.shares(rows)
    ids = Law(IDS).token(np.array(firsts)[:, None], np.arange(WIDTH))
    found = np.zeros_like(expected)
    np.put_along_axis(found, ids, p.astype(np.float32), axis=1)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_draws_are_those_of_the_real_sampling_code() -> None:
    n, vocabulary = 400, Law(IDS)
    rows = sampling_rows(n, temperature=0.8, top_k=30)
    firsts = vocabulary.target(np.arange(n))
    noise = keys(rows.seeds, Purpose.MATCH, rows.rounds, np.arange(n))
    expected = sampling.draw_plain(logits_of(firsts.tolist()), rows, noise).token_ids
    assert law.draw(vocabulary, firsts, law.shares(rows), noise).tolist() == expected.tolist()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.7, 1.3]))
def test_outside_draws_are_those_of_the_real_sampling_code(seed: int, temperature: float) -> None:
    rng, n, vocabulary = np.random.default_rng(seed), 12, Law(IDS)
    rows = sampling_rows(n, temperature=temperature, seed=seed)
    firsts = vocabulary.target(rng.integers(0, 2**62, n))
    groups = [rng.choice(IDS, rng.integers(0, 70), replace=False) for _ in range(n)]
    groups[0] = vocabulary.token(firsts[:1], np.arange(WIDTH))  # leaves nothing outside
    supports = Supports(ints(*map(len, groups)), np.concatenate(groups).astype(np.int32))
    noise = keys(rows.seeds, Purpose.OUTSIDE, rows.rounds, np.arange(n))
    p = sampling.probabilities(logits_of(firsts.tolist()), rows)
    expected = sampling.draw_outside(p, noise, supports)
    tokens, tails, probs = law.draw_outside(vocabulary, firsts, law.shares(rows), noise, supports)
    assert tokens.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(tails, expected.tail_masses, atol=2e-6)
    np.testing.assert_allclose(probs, expected.support_probs, atol=2e-6)


def test_a_draft_agrees_as_often_as_asked_and_else_shares_nothing() -> None:
    vocabulary, prefixes = Law(IDS), np.arange(20_000)
    target = vocabulary.target(prefixes)
    apart = (vocabulary.draft(prefixes, 0.7) - target) % IDS
    assert set(apart.tolist()) == {0, WIDTH}
    assert abs((apart == 0).mean() - 0.7) < 0.01
    assert (vocabulary.draft(prefixes, 1.0) == target).all()
    assert not (vocabulary.draft(prefixes, 0.0) == target).any()


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="127 ids; a simulated model needs 128"):
        Law(127)


# Pages


@settings(deadline=None)
@given(st.data())
def test_prefixes_equal_those_hashed_token_by_token(data: st.DataObject) -> None:
    """Rows of any chunks and rolled-back tails, on scattered pages."""
    size, pages = 4, HashedPages(40, 4)
    tables = np.array_split(np.random.default_rng(3).permutation(40), 3)
    rows: list[list[int]] = [[], [], []]
    for _ in range(data.draw(st.integers(1, 5))):
        step = []
        for row, tokens in enumerate(rows):
            del tokens[data.draw(st.integers(0, len(tokens))) :]
            room = min(len(tables[row]) * size - len(tokens), 9)
            if room:
                new = data.draw(st.lists(st.integers(0, IDS - 1), min_size=1, max_size=room))
                step.append(Row(new, len(tokens), tables[row].tolist()))
                tokens += new
        if step:
            found = pages.extend(token_rows(*step)).tolist()
            expected = []
            for row in step:
                tokens = rows[[table.tolist() for table in tables].index(list(row.pages))]
                expected += [prefix_of(tokens[: row.start + i + 1]) for i in range(len(row.tokens))]
            assert found == expected


def test_a_tree_and_the_copy_of_its_path() -> None:
    pages = HashedPages(2, 8)
    tree = Row([5, 10, 11, 12], 2, [1], parents=[-1, 0, 0, 2])  # 5 then (10 | 11 then 12)
    pages.extend(token_rows(Row([3, 4], 0, [1])))
    found = pages.extend(token_rows(tree)).tolist()
    assert found == [prefix_of([3, 4, 5, *path]) for path in ([], [10], [11], [11, 12])]
    copies = [(8 + 4, 8 + 3), (8 + 5, 8 + 4)]
    assert pages.extend(token_rows(Row([13], 5, [1]), copies=copies)).tolist() == [prefix_of([3, 4, 5, 11, 12, 13])]


ROW = Row([1, 2, 3, 4, 5, 6, 7], 0, [0, 3])  # four slots a page: 0 to 3, 12 to 15
NEXT = Row([8], 7, [0, 3])
OTHER = (Row([1, 2, 3, 5], 0, [7]), Row([9], 4, [7, 3]))


@pytest.mark.parametrize(
    ("steps", "last", "where"),
    [
        pytest.param([ROW, *OTHER], NEXT, r"slot 12 \(page 3\) as its token 4", id="overwritten by another row"),
        pytest.param([ROW], Row([8], 8, [0, 2, 3]), r"slot 8 \(page 2\) as its token 4", id="never written"),
        pytest.param([ROW, Row([9], 2, [0, 3])], NEXT, r"slot 3 \(page 0\) as its token 3", id="after other tokens"),
    ],
)
def test_a_stale_slot_is_named(steps: list[Row], last: Row, where: str) -> None:
    pages = HashedPages(8, 4)
    for row in steps:
        pages.extend(token_rows(row))
    with pytest.raises(InternalError, match=f"row 1 of this step reads {where}"):
        pages.extend(token_rows(Row([1], 0, [6]), last))


def test_a_row_that_is_what_it_believes_goes_on() -> None:
    pages = HashedPages(8, 4)
    for row in (ROW, Row([1, 2, 3, 4], 0, [7]), NEXT):
        pages.extend(token_rows(row))


# Engines


def test_a_step_is_idempotent_and_refuses_what_breaks_the_contract() -> None:
    target = SimulatedTarget(instant(1.0), model(), pages=8)
    grant = target.open(None)

    def step(start: int, *tokens: int) -> TargetStep:
        rows = token_rows(Row(tokens, start, [2]))
        return TargetStep(1, rows, sampling_rows(1), ints(len(tokens) - 1), np.array([DrawRule.MATCH], np.uint8))

    first = target.run(grant, step(0, 5, 6))
    assert target.run(grant, step(0, 5, 6)).token_ids.tolist() == first.token_ids.tolist()
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        target.run(grant, step(0, IDS))
    target.close(grant)


@pytest.mark.parametrize("kind", [ProposalKind.GREEDY, ProposalKind.MATCHED])
def test_a_draft_that_always_agrees_proposes_what_the_target_writes(kind: ProposalKind) -> None:
    drafter = SimulatedDrafter(instant(1.0), model(), pages=8)
    rows = token_rows(Row([5, 6], 0, [2]), Row([7], 0, [3]))
    step = DraftStep(1, rows, sampling_rows(2, temperature=0.0), ints(5, 2), np.full(2, kind, np.uint8), 64)
    proposals = drafter.propose(step)
    assert proposals.node_counts.tolist() == [5, 2]
    assert proposals.token_ids.tolist() == greedy([5, 6], 5) + greedy([7], 2)
