"""Evaluation: what it tells a drafter, and what it makes of the answers, against slow and obvious twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import FORMATS, Twin, chain
from tiny_models import load_reference

from draft_svc.drafters import Drafter, Proposals, create_drafter
from draft_svc.drafters.model import ModelDrafter
from draft_svc.server import DraftConfig
from draft_svc.training.capture import CaptureConfig, capture
from draft_svc.training.documents import Plan
from draft_svc.training.evaluate import EvaluationConfig, evaluate_drafter
from draft_svc.training.replay import Drafting, Replay
from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_paths
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import load_model
from pilotfish.steps import DraftStep, ProposalKind, Supports

VOCAB, HIDDEN, LENGTH = 12, 4, 3
MANIFEST = Manifest("tiny", "weights", "tokens", ("hidden.1", "final"), HIDDEN, "float32", {})
CONFIG = EvaluationConfig(length=LENGTH, every=2, rows=2)
LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def document(seed: int, length: int, prompt_length: int, temperature: float) -> CapturedDocument:
    random = torch.Generator().manual_seed(seed)
    return CapturedDocument(
        token_ids=torch.randint(VOCAB, (length,), generator=random, dtype=torch.int32),
        prompt_length=prompt_length,
        temperature=temperature,
        features=torch.randn(length, 2 * HIDDEN, generator=random).bfloat16(),
    )


DOCUMENTS = [document(1, 20, 4, 0.0), document(2, 9, 7, 0.0), document(3, 15, 1, 1.0), document(4, 11, 5, 0.0)]


class Recorder(Drafter):
    """Holds the pairs of every row as a head would, and drafts the text with mistakes that it knows of.

    Its q is a fixed law of the last pair; sampled drafts follow the text where the noise of the test says so.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED)

    def __init__(self) -> None:
        self.pairs: dict[int, list[tuple[bytes, int]]] = {}  # by first page
        self.asked: list[tuple[CapturedDocument, int, ProposalKind]] = []

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("recorder", "w", "tokens", VOCAB, 64, ("final",), HIDDEN)

    def propose(self, step: DraftStep) -> Proposals:
        assert step.features is not None
        drafted, counts, ids, probs = [], [], [], []
        offsets = step.rows.row_offsets
        firsts = np.cumsum(step.rows.page_counts) - step.rows.page_counts
        for row, kind in enumerate(step.proposal_kinds):
            begin, end = offsets[row], offsets[row + 1]
            pairs = self.pairs.setdefault(int(step.rows.page_ids[firsts[row]]), [])
            del pairs[step.rows.starts[row] :]
            assert len(pairs) == step.rows.starts[row]
            for feature, token in zip(step.features[begin:end], step.rows.token_ids[begin:end], strict=True):
                pairs.append((feature.tobytes(), int(token)))
            found, position = self._find(pairs)
            self.asked.append((found, position, ProposalKind(kind)))
            drafted += draft(found, position)
            for depth in range(LENGTH):
                law = q(position + depth)
                counts.append(len(law))
                ids += [token for token, _ in law]
                probs += [weight for _, weight in law]
            counts.append(0)
        supports = Supports()
        if step.proposal_kinds[0] == ProposalKind.SAMPLED:
            supports = Supports(np.array(counts, np.int32), np.array(ids, np.int32))
        return Proposals(
            node_counts=np.full(len(step.rows.lengths), LENGTH, np.int32),
            token_ids=np.array(drafted, np.int32),
            supports=supports,
            support_probs=np.array(probs if len(supports.counts) else [], np.float32),
        )

    def _find(self, pairs: Sequence[tuple[bytes, int]]) -> tuple[CapturedDocument, int]:
        """The document whose true pairs these are, and how many tokens of it are committed."""
        for each in DOCUMENTS:
            states = each.features[:, HIDDEN:].view(torch.int16).numpy()
            true = [(state.tobytes(), int(token)) for state, token in zip(states, each.token_ids[1:], strict=False)]
            if true[: len(pairs)] == list(pairs):
                return each, len(pairs) + 1
        raise AssertionError("these pairs are of no document")


def draft(found: CapturedDocument, position: int) -> list[int]:
    """The text, with a mistake where position and depth say so."""
    text = found.token_ids[position : position + LENGTH].tolist()
    return [int(token) if (position + 2 * depth) % 5 else (int(token) + 1) % VOCAB for depth, token in enumerate(text)]


def q(position: int) -> list[tuple[int, float]]:
    """Some law, likeliest first."""
    ids = [(position * 7 + i) % VOCAB for i in range(7)]
    weights = np.arange(7, 0, -1) / 28
    return list(zip(ids, weights.tolist(), strict=True))


def test_a_drafter_is_played_true_pairs_and_judged_by_the_text() -> None:
    drafter = Recorder()
    found = evaluate_drafter(drafter, LM_HEAD, MANIFEST, DOCUMENTS, CONFIG)

    def anchors(documents: Sequence[CapturedDocument]) -> list[tuple[int, int]]:
        return [
            (id(each), position)
            for each in documents
            for position in range(each.prompt_length + 1, len(each.token_ids) - LENGTH + 1, 2)
        ]

    greedy = [each for each in DOCUMENTS if each.temperature == 0]
    for kind, documents in ((ProposalKind.GREEDY, greedy), (ProposalKind.SAMPLED, DOCUMENTS)):
        asked = [(id(each), position) for each, position, of_kind in drafter.asked if of_kind == kind]
        assert sorted(asked) == sorted(anchors(documents))

    reached = np.zeros(LENGTH + 1, int)
    for each in greedy:
        for position in range(each.prompt_length + 1, len(each.token_ids) - LENGTH + 1, 2):
            reached[0] += 1
            for depth, token in enumerate(draft(each, position)):
                if token != each.token_ids[position + depth]:
                    break
                reached[depth + 1] += 1
    assert [step.judged for step in found.greedy] == reached[:-1].tolist()
    assert [step.accepted for step in found.greedy] == pytest.approx((reached[1:] / reached[:-1]).tolist())
    assert found.greedy_tokens_per_round == pytest.approx(1 + reached[1:].sum() / reached[0])
    assert found.documents == len(DOCUMENTS)

    for depth, step in enumerate(found.sampled):
        losses, ranks, overlaps = [], [], []
        for each in DOCUMENTS:
            for position in range(each.prompt_length + 1, len(each.token_ids) - LENGTH + 1, 2):
                text = each.token_ids[position : position + LENGTH].tolist()
                if draft(each, position)[:depth] != text[:depth]:
                    continue
                law = dict(q(position + depth))
                p = torch.softmax(LM_HEAD @ each.features[position + depth - 1, HIDDEN:].float(), -1)
                losses.append(-np.log(law.get(text[depth], min(law.values()))))
                ranks.append(list(law).index(text[depth]) if text[depth] in law else VOCAB)
                overlaps.append(sum(min(float(p[token]), weight) for token, weight in law.items()))
        assert step.judged == len(losses)
        assert step.loss == pytest.approx(np.mean(losses))
        assert (step.top1, step.top5) == (np.mean(np.array(ranks) == 0), np.mean(np.array(ranks) < 5))
        assert step.expected_acceptance == pytest.approx(np.mean(overlaps), rel=1e-5)
    rates = [step.expected_acceptance for step in found.sampled]
    assert found.expected_tokens_per_round == pytest.approx(1 + rates[0] + rates[0] * rates[1] + np.prod(rates))


def test_no_more_anchors_than_asked_for() -> None:
    found = evaluate_drafter(Recorder(), LM_HEAD, MANIFEST, DOCUMENTS, EvaluationConfig(LENGTH, 2, anchors=3, rows=2))
    assert (found.greedy[0].judged, found.sampled[0].judged) == (3, 3)


def test_few_anchors_are_spread_over_all_documents() -> None:
    drafting = Drafting(LENGTH, 2, ProposalKind.GREEDY)
    assert [drafting.count(each) for each in DOCUMENTS] == [
        len(range(each.prompt_length + 1, len(each.token_ids) - LENGTH + 1, 2)) for each in DOCUMENTS
    ]
    assert drafting.thinned(DOCUMENTS, 100) == drafting
    thinned = drafting.thinned(DOCUMENTS, 7)
    assert thinned.every % 2 == 0
    assert 4 <= sum(map(thinned.count, DOCUMENTS)) <= 7
    assert sum(map(drafting.thinned(DOCUMENTS, 1).count, DOCUMENTS)) <= len(DOCUMENTS)


def test_what_does_not_belong_together_is_refused() -> None:
    other = Manifest("tiny", "weights", "other tokens", ("final",), HIDDEN, "float32", {})
    with pytest.raises(FailedPreconditionError, match="recorder speaks other tokens than tiny"):
        evaluate_drafter(Recorder(), LM_HEAD, other, DOCUMENTS, CONFIG)
    lacking = Manifest("tiny", "weights", "tokens", ("hidden.1",), HIDDEN, "float32", {})
    with pytest.raises(InvalidArgumentError, match="'final' was not captured"):
        evaluate_drafter(Recorder(), LM_HEAD, lacking, DOCUMENTS, CONFIG)
    with pytest.raises(InvalidArgumentError, match="4 tokens of answer"):
        evaluate_drafter(Recorder(), LM_HEAD, MANIFEST, [document(5, 8, 5, 0.0)], CONFIG)
    with pytest.raises(InvalidArgumentError, match="every is 0"):
        EvaluationConfig(every=0)


def test_a_target_that_drafts_for_itself_is_always_right(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder("llama", sharpness=8.0)
    prompts = tuple(({"role": "user", "content": f"number {i}"},) for i in range(6))
    plan = Plan(prompts, (0.0, 1.0), 0.0, 0)
    capture(folder, tmp_path, CaptureConfig(plan, ("final",), max_tokens=24, rows=3), answer_tokens=10**6)
    manifest = Manifest.read(tmp_path)
    documents = [d for path in shard_paths(tmp_path) for d in Shard.read(path, manifest.feature_width).split()]
    drafter = ModelDrafter(load_model(folder), pages=64)
    reference = load_reference(folder)
    found = evaluate_drafter(drafter, reference.lm_head.weight.detach(), manifest, documents, CONFIG)
    assert found.greedy_tokens_per_round == pytest.approx(1 + LENGTH)
    assert found.sampled[0].expected_acceptance == pytest.approx(1, abs=0.05)  # q is cut to 64 tokens, p is of bfloat16

    losses = []
    for each in documents:
        logits = reference(each.token_ids.long()[None]).logits[0].detach().log_softmax(-1)
        for position in range(each.prompt_length + 1, len(each.token_ids) - LENGTH + 1, 2):
            losses.append(-float(logits[position - 1, int(each.token_ids[position])]))
    assert found.sampled[0].loss == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("name", ["own", "eagle", "eagle3"])
def test_a_head_drafts_at_anchors_what_it_would_draft_without_a_cache(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    target, written = model_folder("llama"), FORMATS[name]
    settings = {"model": written.write(tmp_path), "target_model": target, "dtype": "float32", "pages": 16}
    drafter = create_drafter(DraftConfig.model_validate(settings))
    random = torch.Generator().manual_seed(1)
    documents = [
        CapturedDocument(
            token_ids=torch.randint(VOCAB, (length,), generator=random, dtype=torch.int32),
            prompt_length=length // 2,
            temperature=0.0,
            features=torch.randn(length, written.width, generator=random).bfloat16(),
        )
        for length in (31, 12, 24)
    ]
    columns = list(range(written.width))
    replay = Replay(drafter, rows=2, pages_per_row=4, page_size=16, columns=columns)
    twin = Twin(written, load_file(target / "model.safetensors"))
    anchors = list(replay.anchors(documents, Drafting(LENGTH, 4, ProposalKind.GREEDY)))
    assert len(anchors) > 5
    for anchor in anchors:
        tokens, states = anchor.document.token_ids.tolist(), list(anchor.document.features.float())
        pairs = states[: anchor.position - 1], tokens[1 : anchor.position]
        drafted, _ = chain(twin, *pairs, LENGTH, lambda logits, _: (int(twin.ids[logits.argmax()]), {}))
        assert anchor.drafted.tolist() == drafted
