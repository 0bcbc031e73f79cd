"""Captured documents played back to a serving drafter, as an orchestrator would play them.

A document is one row. At every so many tokens of its answer the drafter is told what was committed since, with the
target's true states if it reads any, and drafts; what it drafted is thrown away, as after a round whose proposal
failed, and the row goes on with the text. Or it is played as rounds, which begin where the last one was accepted to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draft_svc.drafters import Drafter, Proposals
from draft_svc.training.shards import CapturedDocument
from pilotfish.runtime.tensors import to_wire
from pilotfish.steps import DraftStep, Floats, Ints, ProposalKind, SamplingRows, TokenRows


@dataclass(frozen=True, slots=True)
class Anchor:
    """What was drafted at one place of a document."""

    document: CapturedDocument
    position: int
    """Tokens committed there; the first draft token is a guess of ``token_ids[position]``."""
    drafted: Ints
    """[length]"""
    supports: tuple[tuple[Ints, Floats], ...]
    """Token ids, from likely to unlikely, and q of each draft token; empty unless it was sampled."""

    def hits(self) -> int:
        """Draft tokens that equal the text, up to the first that does not."""
        text = self.document.token_ids[self.position : self.position + len(self.drafted)].numpy()
        return int(np.append(self.drafted != text, True).argmax())


@dataclass(frozen=True, slots=True)
class Drafting:
    """How to draft at every anchor."""

    length: int
    """Tokens of a chain."""
    every: int
    """Tokens from one anchor to the next."""
    kind: ProposalKind
    temperature: float = 0.0
    support_limit: int = 64

    def count(self, document: CapturedDocument) -> int:
        """Anchors of a document: those whose whole chain it can judge."""
        return max(0, (len(document.token_ids) - self.length - _first_anchor(document)) // self.every + 1)

    def thinned(self, documents: Sequence[CapturedDocument], most: int) -> Drafting:
        """The same with anchors as far apart as leaves ``most`` of them, or one for each document."""
        drafting = self
        while sum(map(drafting.count, documents)) > max(most, len(documents)):
            drafting = replace(drafting, every=drafting.every + self.every)
        return drafting


class Replay:
    """Plays documents to a drafter.

    Args:
        drafter: with pages for that many rows.
        rows: documents at once.
        pages_per_row: enough for the longest document and what is drafted behind it.
        page_size: slots per page.
        columns: of the captured features, side by side as the drafter reads them; None if it reads none.
    """

    def __init__(
        self, drafter: Drafter, *, rows: int, pages_per_row: int, page_size: int, columns: Sequence[int] | None
    ) -> None:
        self._drafter, self._rows = drafter, rows
        self._pages_per_row, self._page_size = pages_per_row, page_size
        self._columns = None if columns is None else list(columns)

    def anchors(self, documents: Sequence[CapturedDocument], drafting: Drafting) -> Iterator[Anchor]:
        """Drafts at every anchor whose whole chain the document can judge."""
        return self._play(documents, drafting, lambda place, anchor: place.advance(drafting.every))

    def rounds(self, documents: Sequence[CapturedDocument], length: int, *, rebuild: bool = True) -> Iterator[Anchor]:
        """Plays greedy text round by round: each begins behind the token that followed what the last one got right.

        Args:
            documents: written at temperature 0, so that they say what would have been accepted.
            length: draft tokens of a round, at least 1; a document ends where it can judge no whole chain.
            rebuild: draft tokens that were kept are told again, with true states, as serving does. False: their slots
                stay as the head wrote them while it drafted, on states of its own.
        """

        def move(place: _Place, anchor: Anchor) -> None:
            hits = anchor.hits()
            if not rebuild:
                place.computed += min(hits, length - 1)  # nothing is drafted from the last one, so it has no slot yet
            place.advance(hits + 1)

        return self._play(documents, Drafting(length, 1, ProposalKind.GREEDY), move)

    def _play(
        self, documents: Sequence[CapturedDocument], drafting: Drafting, move: Callable[[_Place, Anchor], None]
    ) -> Iterator[Anchor]:
        """Drafts where the places stand, and has ``move`` put them on."""
        waiting = iter(documents)
        places: list[_Place | None] = [None] * self._rows
        step_id = 0
        while True:
            for index, place in enumerate(places):
                if place is None or not place.has_anchor(drafting):
                    document = next((each for each in waiting if _Place(0, each).has_anchor(drafting)), None)
                    places[index] = None if document is None else _Place(index, document)
            playing = [place for place in places if place is not None]
            if not playing:
                return
            step_id += 1
            proposals = self._drafter.propose(self._step(step_id, playing, drafting))
            for place, anchor in zip(playing, _read(playing, proposals), strict=True):
                yield anchor
                move(place, anchor)

    def _step(self, step_id: int, playing: Sequence[_Place], drafting: Drafting) -> DraftStep:
        lead = 0 if self._columns is None else 1  # a head's slot holds a state and the token behind it
        spans = [(place.computed, place.position - lead) for place in playing]
        tokens = [
            place.document.token_ids[begin + lead : end + lead]
            for place, (begin, end) in zip(playing, spans, strict=True)
        ]
        for place, (_, end) in zip(playing, spans, strict=True):
            place.computed = end
        pages = [np.arange(self._pages_per_row) + place.index * self._pages_per_row for place in playing]
        count = len(playing)
        return DraftStep(
            step_id=step_id,
            rows=TokenRows(
                token_ids=np.concatenate([each.numpy() for each in tokens]),
                lengths=np.array([end - begin for begin, end in spans], np.int32),
                starts=np.array([begin for begin, _ in spans], np.int32),
                page_counts=np.full(count, self._pages_per_row, np.int32),
                page_ids=np.concatenate(pages).astype(np.int32),
            ),
            sampling=SamplingRows(
                temperatures=np.full(count, drafting.temperature, np.float32),
                top_ks=np.zeros(count, np.int32),
                top_ps=np.ones(count, np.float32),
                min_ps=np.zeros(count, np.float32),
                seeds=np.array([place.index for place in playing], np.uint64),
                rounds=np.full(count, step_id, np.int64),
            ),
            draft_lengths=np.full(count, drafting.length, np.int32),
            proposal_kinds=np.full(count, drafting.kind, np.uint8),
            support_limit=drafting.support_limit,
            features=None if self._columns is None else self._features(playing, spans),
        )

    def _features(self, playing: Sequence[_Place], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.generic]:
        rows: list[Tensor] = [
            place.document.features[begin:end, self._columns]
            for place, (begin, end) in zip(playing, spans, strict=True)
        ]
        return np.concatenate([to_wire(each) for each in rows])


@dataclass(slots=True)
class _Place:
    """A document that is being played, and how far."""

    index: int
    document: CapturedDocument
    position: int = field(init=False)
    """Of the next anchor."""
    computed: int = 0
    """Slots that the drafter has."""

    def __post_init__(self) -> None:
        self.position = _first_anchor(self.document)

    def has_anchor(self, drafting: Drafting) -> bool:
        return self.position + drafting.length <= len(self.document.token_ids)

    def advance(self, every: int) -> None:
        self.position += every


def _first_anchor(document: CapturedDocument) -> int:
    """The first token of an answer is the target's own, drawn behind the prompt; from there on rounds draft."""
    return document.prompt_length + 1


def _read(playing: Sequence[_Place], proposals: Proposals) -> Iterator[Anchor]:
    """The proposals row by row; a row's supports are those of its last token and its nodes, the leaf's empty."""
    ends = np.cumsum(proposals.node_counts)
    bounds = np.concatenate(([0], np.cumsum(proposals.supports.counts)))
    for row, place in enumerate(playing):
        count = int(proposals.node_counts[row])
        begin = int(ends[row]) - count
        supports: list[tuple[Ints, Floats]] = []
        if len(proposals.supports.counts):
            groups = range(begin + row, begin + row + count)
            supports = [
                (
                    proposals.supports.token_ids[bounds[group] : bounds[group + 1]],
                    proposals.support_probs[bounds[group] : bounds[group + 1]],
                )
                for group in groups
            ]
        yield Anchor(place.document, place.position, proposals.token_ids[begin : begin + count], tuple(supports))
