"""The law of real draws: thousands of requests through the real services, chi-square against the target's p.

Seeds are fixed, so a run is the same every time; the rules are asked for by name, since a seed alone
would choose match.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deployment import Deployment
from drafts import Wrapped
from rows import Shape
from scipy.stats import chi2
from shaped import shaped_slowly
from tiny_heads import FORMATS
from tiny_models import load_reference, make_tiny_llama

from draft_svc.drafters import Proposals, create_drafter
from draft_svc.server import DraftConfig
from pilotfish import AsyncClient, SamplingParams
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.steps import DraftStep

VOCAB = 12
PROMPT = [5, 9, 4, 7]
DRAWS, TREE_DRAWS = 2500, 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), words=VOCAB, layers=2, seed=3, sharpness=2.0)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def draft(folder: Path) -> LoadedModel:
    """Near enough to be accepted often, far enough to be rejected often."""
    return load_model(folder, dtype="float32", layers=1)


@pytest.fixture(scope="module")
def laws(folder: Path) -> dict[tuple[float, int], dict[tuple[int, ...], float]]:
    """Exact joint laws of the second and third completion token, by (temperature, top_k), from Hugging Face."""
    model = load_reference(folder)
    return {setting: joint_law(model, *setting) for setting in ((1.0, 0), (0.7, 6))}


def joint_law(model: object, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    prefixes = [(), *((a,) for a in range(VOCAB)), *product(range(VOCAB), repeat=2)]
    rows = {}
    for length in (0, 1, 2):
        batch = [prefix for prefix in prefixes if len(prefix) == length]
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + list(prefix) for prefix in batch])).logits[:, -1]  # type: ignore[operator]
        for prefix, row in zip(batch, logits.double() / temperature, strict=True):
            kept = row if not top_k else row.masked_fill(row < row.topk(top_k).values[-1], -torch.inf)
            rows[prefix] = kept.softmax(-1).numpy()
    law: Counter[tuple[int, ...]] = Counter()
    for a, b, c in product(range(VOCAB), repeat=3):
        law[b, c] += rows[()][a] * rows[(a,)][b] * rows[a, b][c]
    return dict(law)


async def draw(address: str, params: list[SamplingParams]) -> tuple[Counter[tuple[int, ...]], int, int]:
    """Pairs of second and third tokens; draft tokens judged and kept."""
    pairs: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    gate = asyncio.Semaphore(48)
    async with AsyncClient(address) as client:

        async def one(params: SamplingParams) -> None:
            nonlocal drafted, accepted
            async with gate:
                completion = await client.generate(PROMPT, params)
            pairs[completion.token_ids[1:3]] += 1
            drafted += completion.usage.drafted
            accepted += completion.usage.accepted

        await asyncio.gather(*(one(each) for each in params))
    return pairs, drafted, accepted


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells with fewer than five expected draws taken together."""
    total = sum(counts.values())
    expected = np.array([*law.values()]) * total
    observed = np.array([counts[cell] for cell in law], float)
    assert observed.sum() == total, "a draw of probability zero"
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    cells = expected > 0
    statistic = float((((observed - expected) ** 2)[cells] / expected[cells]).sum())
    return float(chi2.sf(statistic, cells.sum() - 1))


@pytest.mark.parametrize("acceptance", ["match", "ratio", "block"])
@pytest.mark.parametrize("setting", [(1.0, 0), (0.7, 6)], ids=["plain", "top_k"])
def test_draws_follow_the_targets_law(
    acceptance: str,
    setting: tuple[float, int],
    folder: Path,
    target: LoadedModel,
    draft: LoadedModel,
    laws: dict[tuple[float, int], dict[tuple[int, ...], float]],
) -> None:
    temperature, top_k = setting
    params = [
        SamplingParams(
            max_tokens=4,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            acceptance=acceptance,
            draft_length=3,
            ignore_eos=True,
        )
        for seed in range(DRAWS)
    ]
    # Four ids in a support of a vocabulary of twelve: the tail and the outside token are at work too.
    with Deployment(folder, target, (draft,), support_limit=4, max_rows=48) as deployment:
        counts, drafted, accepted = asyncio.run(draw(deployment.address, params))
        deployment.check_pools()
    assert 0.1 < accepted / drafted < 0.9, "the draft must be right and wrong often enough to test anything"
    assert p_value(counts, laws[setting]) > 1e-4


@dataclass
class Counted(Wrapped):
    """Notes how many nodes it proposed in trees that branch."""

    branching: int = 0

    def propose(self, step: DraftStep) -> Proposals:
        proposals = super().propose(step)
        self.branching += len(proposals.parents)
        return proposals


@pytest.fixture
def head(folder: Path, tmp_path: Path) -> Counted:
    """A random MTP head over the target's vocabulary."""
    written = FORMATS["own"]
    written = replace(written, config=written.config | {"vocab_size": VOCAB})
    config = DraftConfig(model=written.write(tmp_path), target_model=folder, dtype="float32", pages=256)
    return Counted(create_drafter(config))


@pytest.mark.parametrize("acceptance", ["match", "ratio", "block"])
def test_draws_follow_the_targets_law_with_trees_of_a_head(
    acceptance: str,
    folder: Path,
    target: LoadedModel,
    head: Counted,
    laws: dict[tuple[float, int], dict[tuple[int, ...], float]],
) -> None:
    """At temperature 1; trees of 10 nodes, 3 deep."""
    params = [
        SamplingParams(max_tokens=4, temperature=1.0, seed=seed, acceptance=acceptance, draft_length=3, ignore_eos=True)
        for seed in range(TREE_DRAWS)
    ]
    settings = {"support_limit": 8, "max_rows": 48, "draft_tree": 10, "features": ("final",)}
    with Deployment(folder, target, (head,), **settings) as deployment:
        counts, drafted, accepted = asyncio.run(draw(deployment.address, params))
        deployment.check_pools()
    assert head.branching > 5 * TREE_DRAWS
    assert 0.1 < accepted / drafted < 0.9
    assert p_value(counts, laws[1.0, 0]) > 1e-4


SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {
        "repetition_penalty": 1.6,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "logit_bias": {6: 1.5, 8: -100},
    },
    "mask": {"regex": "( w[1-6]){4,6}", "frequency_penalty": 1.0},
}


def shaped_law(model: object, name: str) -> dict[tuple[int, ...], float]:
    """The joint law of the second and third token at temperature 1, token by token from the twin of the shaper."""
    asked = SHAPES[name]
    shape = Shape(
        row=0,
        prompt_length=len(PROMPT),
        repetition=asked.get("repetition_penalty", 1.0),
        presence=asked.get("presence_penalty", 0.0),
        frequency=asked.get("frequency_penalty", 0.0),
        biases={token: -math.inf if bias == -100 else bias for token, bias in asked.get("logit_bias", {}).items()},
        allowed=range(5, 11) if name == "mask" else (),  # w1 to w6; w0 is 4
    )

    def law_after(prefix: tuple[int, ...]) -> np.ndarray:
        history = [*PROMPT, *prefix]
        with torch.inference_mode():
            logits = model(torch.tensor([history])).logits[0, -1]  # type: ignore[operator]
        return torch.tensor(shaped_slowly(logits.tolist(), history, shape)).double().softmax(-1).numpy()

    law: Counter[tuple[int, ...]] = Counter()
    first = law_after(())
    for a in range(VOCAB):
        if first[a]:
            second = law_after((a,))
            for b in range(VOCAB):
                third = law_after((a, b)) if second[b] else np.zeros(VOCAB)
                for c in range(VOCAB):
                    law[b, c] += first[a] * second[b] * third[c]
    return dict(law)


@pytest.mark.parametrize(
    ("shape", "acceptance", "tree"),
    [
        *((shape, rule, "off") for shape in SHAPES for rule in ("match", "ratio", "block")),
        ("penalties", "match", "10"),
        ("penalties", "block", "10"),
        ("mask", "ratio", "10"),
    ],
)
def test_shaped_draws_follow_the_shaped_law(
    shape: str, acceptance: str, tree: str, folder: Path, target: LoadedModel, draft: LoadedModel, head: Counted
) -> None:
    """Through chains of a near model, and trees of a random head."""
    params = [
        SamplingParams(
            max_tokens=4,
            temperature=1.0,
            seed=seed,
            acceptance=acceptance,
            draft_length=3,
            ignore_eos=shape != "mask",
            **SHAPES[shape],
        )
        for seed in range(TREE_DRAWS)
    ]
    settings: dict[str, Any] = {"support_limit": 4, "max_rows": 48, "draft_tree": tree}
    if tree != "off":
        settings |= {"support_limit": 8, "features": ("final",)}
    drafter = draft if tree == "off" else head
    with Deployment(folder, target, (drafter,), **settings) as deployment:
        counts, drafted, accepted = asyncio.run(draw(deployment.address, params))
        deployment.check_pools()
    assert 0.1 < accepted / drafted < 0.9
    assert p_value(counts, shaped_law(load_reference(folder), shape)) > 1e-4


def test_the_check_would_notice_another_law(
    folder: Path, target: LoadedModel, laws: dict[tuple[float, int], dict[tuple[int, ...], float]]
) -> None:
    params = [SamplingParams(max_tokens=4, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(DRAWS)]
    with Deployment(folder, target, max_rows=48) as deployment:
        counts, _, _ = asyncio.run(draw(deployment.address, params))
    assert p_value(counts, laws[1.0, 0]) < 1e-4
