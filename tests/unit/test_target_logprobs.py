"""The target's log probabilities against Hugging Face's log softmax, at every kind of place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rows import Row, Shape, ints, sampling_rows, shaping_rows, token_rows
from tiny_models import load_reference, make_tiny_llama
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.loading import load_model
from pilotfish.steps import DrawRule, SamplingRows, Supports, TargetResult, TargetStep, WantedLogprobs
from target_svc.engine import TargetEngine
from target_svc.logprobs import SCORED_AT_ONCE

PROMPT = np.random.default_rng(5).integers(4, 280, SCORED_AT_ONCE + 40).tolist()
TREE, PARENTS = [40, 50, 60, 70], [-1, 0, 0, 1]
PATHS = [[40], [40, 50], [40, 60], [40, 50, 70]]
VOCAB = 280


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TargetEngine:
    return TargetEngine(load_model(folder, dtype="float32"), pages=32)


def laws(folder: Path, tokens: list[int]) -> Tensor:
    """Log softmax after each token, f32[tokens, vocab]."""
    with torch.inference_mode():
        return load_reference(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1)


def run(
    engine: TargetEngine, wanted: WantedLogprobs | None, sampling: SamplingRows, supports: Supports, rule: DrawRule
) -> TargetResult:
    """A prompt whose last token draws, and a tree behind nothing whose every node does."""
    rows = token_rows(Row(PROMPT, 0, list(range(7))), Row(TREE, 0, [8], PARENTS))
    outputs = ints(len(PROMPT) - 1, *(len(PROMPT) + node for node in range(4)))
    step = TargetStep(1, rows, sampling, outputs, np.full(2, rule, np.uint8), supports, logprobs=wanted)
    grant = engine.open(None)
    try:
        return engine.run(grant, step)
    finally:
        engine.close(grant)


SHAPED = shaping_rows(Shape(1, presence=2.0, biases={5: 10.0, 6: float("-inf")}, allowed=[5, 6, 7, 8]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rule", list(DrawRule))
def test_every_place_has_those_of_the_models_own_law(
    temperature: float, rule: DrawRule, engine: TargetEngine, folder: Path
) -> None:
    """Whatever temperature, truncation and shaping do to what is drawn there."""
    plain = sampling_rows(2, temperature=temperature, top_k=20, seed=3)
    groups = [[], [5, 6], [7], [], [9, 10, 11]] if rule is DrawRule.OUTSIDE else [[]] * 5
    supports = Supports(ints(*map(len, groups)), ints(*(token for group in groups for token in group)))
    counts = [4, -1, 0, 3, 20]
    wanted = WantedLogprobs(
        ints(*counts),
        ints(*range(len(PROMPT) - 1)),
        ints(*PROMPT[1:]),
        ints(*(index % 3 for index in range(len(PROMPT) - 1))),
    )
    for sampling in (plain, replace(plain, shaping=SHAPED)):
        found = run(engine, wanted, sampling, supports, rule)
        assert found.logprobs is not None
        after_prompt = laws(folder, PROMPT)
        of_outputs = [after_prompt[-1], *(laws(folder, path)[-1] for path in PATHS)]
        tokens, ids, tops = [], [], []
        for law, draw, count, group in zip(of_outputs, found.token_ids.tolist(), counts, groups, strict=True):
            if count >= 0:
                tokens.append(float(law[draw]) if draw >= 0 else -np.inf)
                ids += law[group].tolist()
                tops.append((law, count))
        tokens += [float(after_prompt[at, token]) for at, token in enumerate(PROMPT[1:])]
        tops += [(after_prompt[at], at % 3) for at in range(len(PROMPT) - 1)]
        np.testing.assert_allclose(found.logprobs.tokens, tokens, atol=2e-4)
        np.testing.assert_allclose(found.logprobs.supports, ids, atol=2e-4)
        top = [law.topk(count) for law, count in tops]
        assert found.logprobs.top_token_ids.tolist() == [i for each in top for i in each.indices.tolist()]
        np.testing.assert_allclose(found.logprobs.top, [v for each in top for v in each.values.tolist()], atol=2e-4)


def test_asking_for_them_changes_no_draw(engine: TargetEngine) -> None:
    sampling = sampling_rows(2, temperature=0.7, seed=3)
    wanted = WantedLogprobs(ints(0, 0, 0, 0, 0))
    with_them = run(engine, wanted, sampling, Supports(), DrawRule.MATCH)
    without = run(engine, None, sampling, Supports(), DrawRule.MATCH)
    assert without.logprobs is None
    assert with_them.token_ids.tolist() == without.token_ids.tolist()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (WantedLogprobs(ints(0, 0)), "length of logprobs.counts is 2; must be 5"),
        (WantedLogprobs(ints(0, 0, 0, 0, 281)), r"logprobs.counts\[4\] is 281; must be in \[-1, 280\]"),
        (WantedLogprobs(ints(0, 0, 0, 0, 0), ints(3)), "length of logprobs.scored_token_ids is 0; must equal the 1"),
        (WantedLogprobs(ints(0, 0, 0, 0, 0), ints(3, 3), ints(1, 1), ints(0, 0)), "scored_nodes is not ascending"),
        (WantedLogprobs(ints(0, 0, 0, 0, 0), ints(3), ints(280), ints(0)), r"scored_token_ids\[0\] is 280"),
        (WantedLogprobs(ints(0, 0, 0, 0, 0), ints(3), ints(1), ints(-1)), r"scored_counts\[0\] is -1"),
        (WantedLogprobs(ints(0, 0, 0, 0, 0), ints(999), ints(1), ints(0)), r"scored_nodes\[0\] is 999"),
    ],
)
def test_steps_that_break_the_contract_are_refused(wanted: WantedLogprobs, message: str, engine: TargetEngine) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run(engine, wanted, sampling_rows(2, temperature=0.0), Supports(), DrawRule.MATCH)


def test_padded_ids_are_never_listed(tmp_path: Path) -> None:
    """Of a model with more rows of output than its tokenizer has ids."""
    model = load_model(make_tiny_llama(tmp_path, padded_vocab=VOCAB + 24), dtype="float32")
    engine = TargetEngine(model, pages=32)
    grant = engine.open(None)
    rows = token_rows(Row(PROMPT[:9], 0, [0]))
    wanted = WantedLogprobs(ints(VOCAB))
    step = TargetStep(1, rows, sampling_rows(1, temperature=0.0), ints(8), np.ones(1, np.uint8), logprobs=wanted)
    found = engine.run(grant, step).logprobs
    assert found is not None
    assert sorted(found.top_token_ids.tolist()) == list(range(VOCAB))
    assert float(np.exp(found.top).sum()) < 1  # the law is the model's, which gives some to what it pads
