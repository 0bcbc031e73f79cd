"""Fake workers that notice every paging mistake.

Where a model keeps K and V, these keep two numbers per slot: the token id, and a hash of the whole
prefix it was computed under. A row that reads a slot written under another prefix, or never written,
is caught at once, just as a real model would silently compute nonsense.

The fake target's feature of a token names the whole history up to it, so that a fake head, which is
given nothing else of the past, can say of every pair that it ever holds whether it is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from pilotfish import noise
from pilotfish.noise import Purpose
from pilotfish.steps import (
    Capabilities,
    DraftResult,
    DraftStep,
    DrawRule,
    FeatureRule,
    Grant,
    Logprobs,
    ProposalKind,
    SamplingRows,
    Supports,
    TargetResult,
    TargetStep,
    TokenRows,
    WantedLogprobs,
)

VOCAB = 50


STATES = ("hidden.1", "final")
STATE_WIDTH = 4  # a prefix hash as uint16, bfloat16 to those who do not look closely


def grant(
    page_count: int,
    page_size: int = 4,
    first_page: int = 0,
    max_len: int = 512,
    features: tuple[str, ...] = (),
    max_step_tokens: int = 256,
) -> Grant:
    return Grant(
        model_id="fake",
        weights_hash="w",
        tokenizer_hash="t",
        vocab_size=VOCAB,
        page_size=page_size,
        first_page=first_page,
        page_count=page_count,
        max_len=max_len,
        max_step_tokens=max_step_tokens,
        incarnation=1,
        features=features,
        feature_width=STATE_WIDTH * len(features),
        gives_logprobs=True,
    )


def prefix_hash(tokens: tuple[int, ...]) -> int:
    data = np.array(tokens, np.int32).tobytes()
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


_HISTORIES: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}


def feature(name: str, history: tuple[int, ...]) -> tuple[int, ...]:
    """The state of that name at the last token of a history: STATE_WIDTH numbers that name both."""
    data = np.array(history, np.int32).tobytes() + name.encode()
    state = tuple(np.frombuffer(blake2b(data, digest_size=2 * STATE_WIDTH).digest(), np.uint16).tolist())
    _HISTORIES[state] = (name, history)
    return state


def history_of(name: str, state: tuple[int, ...]) -> tuple[int, ...]:
    """Inverse of ``feature``."""
    assert state in _HISTORIES, f"{state} is no feature"
    found, history = _HISTORIES[state]
    assert found == name, f"a feature {found} stands for {name}"
    return history


def law(tokens: tuple[int, ...]) -> np.ndarray:
    """The fake model's p after a prefix, f64[VOCAB]."""
    generator = np.random.default_rng(prefix_hash(tokens))
    weights = generator.exponential(size=VOCAB) ** 4
    return weights / weights.sum()


def logprob(history: tuple[int, ...], token: int) -> float:
    return float(np.log(law(history)[token]))


def top_logprobs(history: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after a history, and their log probabilities."""
    order = np.argsort(-law(history), kind="stable")[:count].tolist()
    return [(token, logprob(history, token)) for token in order]


@dataclass
class PagedMemory:
    """Slots of one worker."""

    grant: Grant
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot: (token, hash of the prefix up to it)

    def histories(self, rows: TokenRows) -> list[tuple[int, ...]]:
        """Writes a step's tokens and returns the full history of each, checking all that it reads."""
        for source, destination in rows.slot_copies.tolist():
            self.slots[destination] = self.slots[source]
        histories: list[tuple[int, ...]] = []
        token = page = 0
        for length, start, pages in zip(rows.lengths, rows.starts, rows.page_counts, strict=True):
            table = rows.page_ids[page : page + pages].tolist()
            page += pages
            committed = self._read(table, int(start))
            row: list[tuple[int, ...]] = []
            for index in range(length):
                parent = int(rows.parents[token]) if len(rows.parents) else index - 1
                before = committed if parent < 0 else row[parent]
                history = (*before, int(rows.token_ids[token]))
                self.slots[self._slot(table, int(start) + index)] = (history[-1], prefix_hash(history))
                row.append(history)
                token += 1
            histories += row
        return histories

    def _slot(self, table: list[int], index: int) -> int:
        return table[index // self.grant.page_size] * self.grant.page_size + index % self.grant.page_size

    def _read(self, table: list[int], length: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for index in range(length):
            slot = self._slot(table, index)
            assert slot in self.slots, f"slot {slot} (index {index}) was never written"
            token, computed_under = self.slots[slot]
            tokens = (*tokens, token)
            assert computed_under == prefix_hash(tokens), (
                f"slot {slot} (index {index}) was computed under another prefix"
            )
        return tokens


@dataclass
class FakeTarget:
    """Answers steps by ``law``; what it says is what the contract asks for."""

    grant: Grant

    def __post_init__(self) -> None:
        self.memory = PagedMemory(self.grant)
        self.histories: dict[int, tuple[int, ...]] = {}  # of each prefix hash that is cached

    def read_features(self, slots: np.ndarray) -> np.ndarray:
        """Features of slots, ``[slots, feature_width]``."""
        return self._features([self.histories[self.memory.slots[slot][1]] for slot in slots.tolist()])

    def _features(self, histories: list[tuple[int, ...]]) -> np.ndarray:
        values = [[v for name in self.grant.features for v in feature(name, history)] for history in histories]
        return np.array(values, np.uint16).reshape(-1, self.grant.feature_width)

    def run(self, step: TargetStep) -> TargetResult:
        step.validate(self.grant)
        histories = self.memory.histories(step.rows)
        row_of = np.repeat(np.arange(len(step.rows.lengths)), step.rows.lengths)
        bounds = [0, *np.cumsum(step.supports.counts).tolist()] if len(step.supports.counts) else None
        tokens, tails, probs = [], [], []
        for output, node in enumerate(step.output_nodes.tolist()):
            row, history = int(row_of[node]), histories[node]
            ids = step.supports.token_ids[bounds[output] : bounds[output + 1]] if bounds else np.zeros(0, np.int32)
            p = processed(law(history), float(step.sampling.temperatures[row]))
            outside = p.copy()
            outside[ids] = 0
            tails.append(outside.sum())
            probs += p[ids].tolist()
            purpose = Purpose.MATCH if step.draw_rules[row] == DrawRule.MATCH else Purpose.OUTSIDE
            tokens.append(draw(outside, step.sampling, row, purpose, len(history)) if outside.sum() > 0 else -1)
        self.histories |= {prefix_hash(history): history for history in histories}
        wanted = self._wanted(step, np.array(tokens, np.int32))
        return TargetResult(
            step.step_id,
            np.array(tokens, np.int32),
            np.array(tails, np.float32),
            np.array(probs, np.float32),
            0,
            self._features([histories[node] for node in wanted]) if wanted else None,
            None if step.logprobs is None else self._logprobs(step, step.logprobs, histories, tokens),
        )

    def _logprobs(
        self, step: TargetStep, wanted: WantedLogprobs, histories: list[tuple[int, ...]], draws: list[int]
    ) -> Logprobs:
        """Place by place, as target.proto says."""
        counts = step.supports.counts if len(step.supports.counts) else np.zeros(len(draws), np.int32)
        groups = np.split(step.supports.token_ids, np.cumsum(counts))
        nodes = step.output_nodes.tolist()
        outputs = [
            (histories[node], draw, count, ids.tolist())
            for node, draw, count, ids in zip(nodes, draws, wanted.counts.tolist(), groups, strict=False)
            if count >= 0
        ]
        scored = zip(wanted.scored_nodes, wanted.scored_token_ids.tolist(), wanted.scored_counts.tolist(), strict=True)
        places = [*outputs, *((histories[node], token, count, []) for node, token, count in scored)]
        tops = [top_logprobs(history, count) for history, _, count, _ in places]
        return Logprobs(
            np.array([logprob(history, token) if token >= 0 else -np.inf for history, token, *_ in places], np.float32),
            np.array([logprob(history, token) for history, _, _, ids in places for token in ids], np.float32),
            np.array([token for top in tops for token, _ in top], np.int32),
            np.array([value for top in tops for _, value in top], np.float32),
        )

    def _wanted(self, step: TargetStep, draws: np.ndarray) -> list[int]:
        """Tokens whose features the step asks for."""
        wanted: list[int] = []
        first = 0
        drawn = dict(zip(step.output_nodes.tolist(), draws.tolist(), strict=True))
        for row, rule in enumerate(step.feature_rules.tolist()):
            tokens = range(first, first + int(step.rows.lengths[row]))
            first = tokens.stop
            if rule == FeatureRule.ALL:
                wanted += tokens
            elif rule == FeatureRule.MATCHED:
                at: int | None = tokens.start
                while at is not None:
                    wanted.append(at)
                    at = next((t for t in tokens if self._follows(step, tokens, t, at, drawn[at])), None)
        return wanted

    @staticmethod
    def _follows(step: TargetStep, tokens: range, token: int, at: int, drawn: int) -> bool:
        parent = int(step.rows.parents[token]) if len(step.rows.parents) else token - tokens.start - 1
        return parent == at - tokens.start and int(step.rows.token_ids[token]) == drawn


@dataclass
class FakeDraft:
    """Drafts from the target's own law, spoiled with probability 1 - agreement.

    Args:
        grant: of its pages.
        agreement: how often its q is the target's p; else it is the law of another prefix.
        branches: children of every node but the leaves; 1 drafts chains.
    """

    grant: Grant
    agreement: float = 0.7
    branches: int = 1

    def __post_init__(self) -> None:
        self.memory = PagedMemory(self.grant)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(tuple(ProposalKind), tree_width=self.branches if self.branches > 1 else 0)

    def run(self, step: DraftStep) -> DraftResult:
        step.validate(self.grant, self.capabilities)
        nodes, counts, parents, supports, probs = [], [], [], [], []
        for row, root in enumerate(self._roots(step)):
            tree = self._tree(step, row, root)
            counts.append(len(tree))
            nodes += [token for token, _, _ in tree]
            parents += [parent for _, parent, _ in tree]
            groups = self._supports(step, row, root, tree)
            supports += [ids for ids, _ in groups]
            probs += [q for _, q in groups]
            self._cache(step, row, root, tree)
        has_q = any(len(ids) for ids in supports)
        return DraftResult(
            step_id=step.step_id,
            node_counts=np.array(counts, np.int32),
            token_ids=np.array(nodes, np.int32),
            compute_us=0,
            parents=np.array(parents if len(step.node_limits) else [], np.int32),
            supports=Supports(np.array([len(ids) for ids in supports], np.int32), _flat(supports, np.int32))
            if has_q
            else Supports(),
            support_probs=_flat(probs, np.float32) if has_q else np.zeros(0, np.float32),
        )

    def q(self, step: DraftStep, row: int, history: tuple[int, ...]) -> np.ndarray:
        """The drafter's law after a history, over the whole vocabulary, f32[VOCAB]."""
        spoiled = prefix_hash(history) % 1000 >= 1000 * self.agreement
        p = processed(law((*history, -1) if spoiled else history), float(step.sampling.temperatures[row]))
        if step.proposal_kinds[row] == ProposalKind.SAMPLED:
            keep = np.argsort(-p, kind="stable")[: step.support_limit]
            kept = np.zeros(VOCAB)
            kept[keep] = p[keep]
            p = kept / kept.sum()
        return p.astype(np.float32)

    def _roots(self, step: DraftStep) -> list[tuple[int, ...]]:
        """Caches the step's tokens; the history of each row's last one."""
        histories = self.memory.histories(step.rows)
        return [histories[end - 1] for end in np.cumsum(step.rows.lengths).tolist()]

    def _tree(self, step: DraftStep, row: int, root: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
        """(token, parent, history) of each node, breadth first."""
        limit = int(step.node_limits[row]) if len(step.node_limits) else int(step.draft_lengths[row])
        branches = self.branches if limit > step.draft_lengths[row] else 1
        tree: list[tuple[int, int, tuple[int, ...]]] = []
        level = [(-1, root)]
        for _ in range(int(step.draft_lengths[row])):
            following = []
            for parent, history in level:
                for token in self._children(step, row, history)[:branches]:
                    if len(tree) < limit:
                        tree.append((token, parent, (*history, token)))
                        following.append((len(tree) - 1, tree[-1][2]))
            level = following
        return tree

    def _children(self, step: DraftStep, row: int, history: tuple[int, ...]) -> list[int]:
        q = self.q(step, row, history).astype(np.float64)
        purpose = Purpose.DRAFT if step.proposal_kinds[row] == ProposalKind.SAMPLED else Purpose.MATCH
        children: list[int] = []
        while len(children) < self.branches and q.sum() > 0:
            children.append(draw(q, step.sampling, row, purpose, len(history)))
            q[children[-1]] = 0
        return children

    def _supports(
        self, step: DraftStep, row: int, root: tuple[int, ...], tree: list[tuple[int, int, tuple[int, ...]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        parents = {parent for _, parent, _ in tree}
        groups = []
        for index, history in enumerate([root, *(history for _, _, history in tree)]):
            sampled = step.proposal_kinds[row] == ProposalKind.SAMPLED and index - 1 in parents
            q = self.q(step, row, history) if sampled else np.zeros(VOCAB, np.float32)
            ids = q.nonzero()[0]
            groups.append((ids, q[ids]))
        return groups

    def _cache(
        self, step: DraftStep, row: int, root: tuple[int, ...], tree: list[tuple[int, int, tuple[int, ...]]]
    ) -> None:
        """Writes the nodes that have children, as a drafter does when it goes on from them."""
        first = int(step.rows.page_counts[:row].sum())
        table = step.rows.page_ids[first : first + int(step.rows.page_counts[row])].tolist()
        parents = {parent for _, parent, _ in tree}
        for node, (token, _, history) in enumerate(tree):
            if node in parents:
                slot = self.memory._slot(table, len(root) + node)
                self.memory.slots[slot] = (token, prefix_hash(history))


@dataclass
class FakeHead(FakeDraft):
    """Drafts from the target's own law as ``FakeDraft`` does, knowing of the past what the features tell.

    Slot i of a row must hold the feature of the row's token i and its token i + 1, whenever it is read. All
    slots that a proposal may use are spoiled, as a head does that runs on features of its own making.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pairs: dict[int, tuple[tuple[int, ...], int] | None] = {}  # slot: (history of the feature, token)
        self.held = 0  # pairs that were looked at

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(tuple(ProposalKind), tree_width=3 if self.branches > 1 else 0)

    def _roots(self, step: DraftStep) -> list[tuple[int, ...]]:
        assert step.features is not None
        assert not len(step.rows.parents)
        assert not len(step.rows.slot_copies)
        assert step.features.dtype == np.uint16
        roots, first = [], 0
        for row, (start, length) in enumerate(zip(step.rows.starts.tolist(), step.rows.lengths.tolist(), strict=True)):
            slots = self._slots(step, row)
            for i in range(length):
                pair = self._history(step.features[first + i]), int(step.rows.token_ids[first + i])
                self.pairs[slots[start + i]] = pair
            first += length
            pairs = [self.pairs.get(slot) for slot in slots[: start + length]]
            roots.append(self._checked(pairs, may_be_lost=self._goes_on(step, row)))
        return roots

    def _goes_on(self, step: DraftStep, row: int) -> bool:
        """Whether a row begins where the one before it ends: the other outcome of the same request."""
        ends = step.rows.starts[row - 1] + step.rows.lengths[row - 1] == step.rows.starts[row]
        return row > 0 and bool(ends) and self._slots(step, row - 1) == self._slots(step, row)

    def _history(self, values: np.ndarray) -> tuple[int, ...]:
        """The history that all states of one token agree on."""
        states = [tuple(state) for state in values.reshape(-1, STATE_WIDTH).tolist()]
        histories = {history_of(name, state) for name, state in zip(self.grant.features, states, strict=True)}
        assert len(histories) == 1, "states of different tokens stand side by side"
        return histories.pop()

    def _checked(self, pairs: list[tuple[tuple[int, ...], int] | None], may_be_lost: bool) -> tuple[int, ...]:
        """The history of a row's last token; that of an outcome which has not come is its own."""
        for slot, pair in enumerate(pairs[:-1] if may_be_lost else pairs):
            assert pair is not None, f"slot {slot} holds what was drafted"
            history, _ = pair
            assert len(history) == slot + 1, f"slot {slot} holds the feature of token {len(history) - 1}"
            before = pairs[slot - 1] if slot else None
            assert before is None or history == (*before[0], before[1]), f"slot {slot} belongs to another row"
            self.held += 1
        assert pairs[-1] is not None
        return (*pairs[-1][0], pairs[-1][1])

    def _slots(self, step: DraftStep, row: int) -> list[int]:
        """All slots of a row's page table."""
        first, size = int(step.rows.page_counts[:row].sum()), self.grant.page_size
        pages = step.rows.page_ids[first : first + int(step.rows.page_counts[row])].tolist()
        return [page * size + offset for page in pages for offset in range(size)]

    def _cache(
        self, step: DraftStep, row: int, root: tuple[int, ...], tree: list[tuple[int, int, tuple[int, ...]]]
    ) -> None:
        end = int(step.rows.starts[row] + step.rows.lengths[row])
        used = int(step.draft_slots(self.capabilities.tree_width)[row])
        self.pairs |= dict.fromkeys(self._slots(step, row)[end : end + used])


def processed(p: np.ndarray, temperature: float) -> np.ndarray:
    """p at a temperature; 0 is one-hot."""
    if temperature == 0:
        return np.eye(VOCAB)[p.argmax()]
    scaled = p ** (1 / temperature)
    return scaled / scaled.sum()


def draw(p: np.ndarray, sampling: SamplingRows, row: int, purpose: Purpose, position: int) -> int:
    """A token from p by the row's noise."""
    round_index = 0 if purpose is Purpose.MATCH else int(sampling.rounds[row])
    ids = p.nonzero()[0]
    keys = np.array([noise.key(int(sampling.seeds[row]), purpose, round_index, position)])
    return int(ids[noise.race(keys, ids.astype(np.int64), p[ids])])


def prompt(seed: int, length: int) -> list[int]:
    """Any tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def plain_text(start: list[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """What the target alone would write: the slow twin of everything here (match rule)."""
    history = tuple(start)
    for _ in range(count):
        p = processed(law(history), temperature)
        ids = p.nonzero()[0]
        keys = np.array([noise.key(seed, Purpose.MATCH, 0, len(history))])
        history = (*history, int(ids[noise.race(keys, ids.astype(np.int64), p[ids])]))
    return list(history[len(start) :])


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype)
