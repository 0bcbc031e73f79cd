"""``pilotfish train evaluate``: how good a drafter is, asked through the code that serves it.

Two passes over captured answers, both with chains from anchors inside them:

- **greedy**, over answers that the target gave at temperature 0. The text itself is the judge: what a chain shares with
  it is what greedy verification would accept.
- **sampled** at temperature 1, over all answers: q of every draft token, against the text (loss, top-1, top-5) and
  against the target's p (expected acceptance, the sum of min(p, q): Leviathan et al., arXiv 2211.17192, section 3.2).

Draft step k is judged where the steps before it drafted the text, as it is in serving; so the loss of later steps is
that of text which is easy to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters import Drafter, create_drafter
from draft_svc.server import DraftConfig
from draft_svc.training.replay import Anchor, Drafting, Replay
from draft_svc.training.shards import CapturedDocument, Manifest, Shard, is_held_out, shard_paths
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.layer_shapes import EMBEDDINGS, HEAD
from pilotfish.runtime.weights import read_tensors, weights_hash
from pilotfish.steps import Floats, Ints, ProposalKind

_PAGE_SIZE = 16
_SUPPORT = 64  # tokens of q that are served (DESIGN.md, section 1)
_WIDE_SUPPORT = 512  # that the loss looks at
_FINAL = "final"
_CHUNK = 64  # anchors whose p exists at once


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """How to evaluate."""

    length: int = 4
    """Draft tokens of a chain."""
    every: int = 8
    """Tokens from one anchor to the next, at least."""
    anchors: int = 4000
    """Of each pass, at most; where there are more, they stand farther apart."""
    rows: int = 16
    """Documents at once."""
    held_out: bool = True
    """Only the documents that ``fit`` holds out."""

    def __post_init__(self) -> None:
        for name in ("length", "every", "anchors", "rows"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; must be at least 1")


@dataclass(frozen=True, slots=True)
class GreedyStep:
    """One draft step against greedy text."""

    judged: int
    """Anchors whose earlier draft tokens were right."""
    accepted: float
    """Share of those whose draft token is right."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One draft step at temperature 1."""

    judged: int
    """Anchors whose earlier draft tokens were those of the text."""
    loss: float
    """Mean -log q of the text's token, in nats; a token outside of q's widest support counts like the least likely one
    inside, so that this is too low by a little."""
    top1: float
    """Share of text tokens that are q's likeliest."""
    top5: float
    """Share of text tokens among q's five likeliest."""
    expected_acceptance: float
    """Mean of sum min(p, q), q cut to the support that is served."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found."""

    drafter: str
    documents: int
    greedy: tuple[GreedyStep, ...]
    """Empty without answers at temperature 0."""
    greedy_tokens_per_round: float | None
    sampled: tuple[SampledStep, ...]
    """Empty if the drafter does not sample."""
    expected_tokens_per_round: float | None
    """At temperature 1, if every step is accepted like those judged."""


def evaluate(
    head: Path,
    target: Path,
    data: Path,
    config: EvaluationConfig,
    *,
    dtype: str = "auto",
    on_anchor: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates the drafter in a folder on captured text.

    Args:
        head: folder of the head or draft model.
        target: folder of the target.
        data: folder of captured text.
        config: how.
        dtype: that the drafter computes in.
        on_anchor: called at every anchor.

    Raises:
        FailedPreconditionError: if drafter, target and text do not belong together.
        InvalidArgumentError: if there is nothing to judge on.
    """
    manifest = Manifest.read(data)
    if weights_hash(target) != manifest.weights_hash:
        raise FailedPreconditionError(f"{data} holds text of {manifest.model_id}, not of the target in {target}")
    documents = read_documents(data, manifest, held_out=config.held_out)
    pages = config.rows * _pages_per_row(documents, config)
    settings = {"model": head, "target_model": target, "dtype": dtype, "page_size": _PAGE_SIZE, "pages": pages}
    # Not by the constructor, which would read the environment of a draft service.
    drafter = create_drafter(DraftConfig.model_validate(settings))
    return evaluate_drafter(drafter, _lm_head(target), manifest, documents, config, on_anchor)


def evaluate_drafter(
    drafter: Drafter,
    lm_head: Tensor,
    manifest: Manifest,
    documents: Sequence[CapturedDocument],
    config: EvaluationConfig,
    on_anchor: Callable[[], None] = lambda: None,
) -> Evaluation:
    """``evaluate``, with everything loaded; ``drafter`` has pages for ``config.rows`` of the longest documents.

    Args:
        lm_head: of the target, [vocab, hidden].
    """
    info = drafter.info
    if info.tokenizer_hash != manifest.tokenizer_hash:
        raise FailedPreconditionError(
            f"{info.model_id} speaks other tokens than {manifest.model_id}, whose text this is"
        )
    replay = Replay(
        drafter,
        rows=config.rows,
        pages_per_row=_pages_per_row(documents, config),
        page_size=_PAGE_SIZE,
        columns=manifest.columns(info.features) if info.features else None,
    )

    def anchors(documents: Sequence[CapturedDocument], drafting: Drafting) -> Iterator[Anchor]:
        thinned = drafting.thinned(documents, config.anchors)
        for anchor in islice(replay.anchors(documents, thinned), config.anchors):
            on_anchor()
            yield anchor

    greedily = Drafting(config.length, config.every, ProposalKind.GREEDY)
    hits = [anchor.hits() for anchor in anchors([each for each in documents if each.temperature == 0], greedily)]
    steps: list[SampledStep] = []
    if ProposalKind.SAMPLED in drafter.kinds:
        sampling = Drafting(config.length, config.every, ProposalKind.SAMPLED, 1.0, _WIDE_SUPPORT)
        steps = _judge_sampled(anchors(documents, sampling), manifest.columns([_FINAL]), lm_head, config.length)
    if not hits and not steps:
        raise InvalidArgumentError(
            f"no document has the {config.length + 1} tokens of answer that judge a chain; capture more, or draft less"
        )
    rates = [step.expected_acceptance for step in steps]
    return Evaluation(
        drafter=info.model_id,
        documents=len(documents),
        greedy=_greedy_steps(hits, config.length),
        greedy_tokens_per_round=1 + float(np.mean(hits)) if hits else None,
        sampled=tuple(steps),
        expected_tokens_per_round=1 + float(np.cumprod(rates).sum()) if rates else None,
    )


def _pages_per_row(documents: Sequence[CapturedDocument], config: EvaluationConfig) -> int:
    """That the longest document takes, with a chain behind it."""
    longest = max((len(document.token_ids) for document in documents), default=0)
    return -(-(longest + config.length) // _PAGE_SIZE)


def _judge_sampled(anchors: Iterator[Anchor], final: list[int], lm_head: Tensor, length: int) -> list[SampledStep]:
    judges = [_Judge() for _ in range(length)]
    while some := list(islice(anchors, _CHUNK)):
        # Steps up to the first whose draft is not the text's: what would be drafted behind another token is unknown.
        judged = [range(min(anchor.hits() + 1, len(anchor.drafted))) for anchor in some]
        places = [anchor.position - 1 + step for anchor, steps in zip(some, judged, strict=True) for step in steps]
        documents = [anchor.document for anchor, steps in zip(some, judged, strict=True) for _ in steps]
        states = [document.features[place, final] for document, place in zip(documents, places, strict=True)]
        laws = iter(torch.softmax(torch.stack(states).float() @ lm_head.T, -1).numpy())
        for anchor, steps in zip(some, judged, strict=True):
            for step in steps:
                text = int(anchor.document.token_ids[anchor.position + step])
                judges[step].add(*anchor.supports[step], text, next(laws))
    return [judge.step() for judge in judges if judge.losses]


def read_documents(folder: Path, manifest: Manifest, *, held_out: bool) -> list[CapturedDocument]:
    """Captured documents that can be judged on: all of them, or those only that ``fit`` holds out."""
    shards = [Shard.read(path, manifest.feature_width) for path in shard_paths(folder)]
    documents = [document for shard in shards for document in shard.split() if document.answer_tokens > 1]
    return [each for i, each in enumerate(documents) if is_held_out(i)] if held_out else documents


def _lm_head(target: Path) -> Tensor:
    config = ModelConfig.from_folder(target)
    name = EMBEDDINGS if config.tied_embeddings else HEAD
    return read_tensors(target, {name: (config.vocab_size, config.hidden_size)})[name].float()


def _greedy_steps(hits: Sequence[int], length: int) -> tuple[GreedyStep, ...]:
    steps = []
    for step in range(length):
        judged, accepted = sum(each >= step for each in hits), sum(each > step for each in hits)
        if judged:
            steps.append(GreedyStep(judged, accepted / judged))
    return tuple(steps)


class _Judge:
    """Adds up one draft step of the sampled pass."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._ranks: list[int] = []
        self._overlaps: list[float] = []

    def add(self, token_ids: Ints, q: Floats, text: int, p: Floats) -> None:
        """One draft token: its support from likely to unlikely, the text's token, and the target's law."""
        found = np.flatnonzero(token_ids == text)
        self.losses.append(-float(np.log(q[found[0]] if len(found) else q.min())))
        self._ranks.append(int(found[0]) if len(found) else len(token_ids))
        served = q[:_SUPPORT] / q[:_SUPPORT].sum()
        self._overlaps.append(float(np.minimum(p[token_ids[:_SUPPORT]], served).sum()))

    def step(self) -> SampledStep:
        ranks = np.array(self._ranks)
        return SampledStep(
            judged=len(ranks),
            loss=float(np.mean(self.losses)),
            top1=float(np.mean(ranks == 0)),
            top5=float(np.mean(ranks < 5)),
            expected_acceptance=float(np.mean(self._overlaps)),
        )
