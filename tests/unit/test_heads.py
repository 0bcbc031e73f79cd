"""Heads of every format, driven step by step: what they propose is what their slow twin proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, ints, sampling_rows, token_rows
from safetensors.torch import load_file
from tiny_heads import FORMATS, Twin, chain
from tiny_models import make_tiny_llama
from torch import Tensor

from draft_svc.drafters import Drafter, create_drafter
from draft_svc.drafters.children import drawn_children, likeliest_children, matched_children
from draft_svc.drafters.tree_shapes import DEFAULT
from draft_svc.drafters.trees import DynamicTree, Nodes, StaticTree, Tree
from draft_svc.server import DraftConfig
from pilotfish import noise
from pilotfish.noise import Purpose
from pilotfish.runtime.tensors import to_wire
from pilotfish.steps import DraftStep, ProposalKind, SamplingRows

GREEDY, SAMPLED, MATCHED = ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED
TEMPERATURE, SEED, ROUND, LIMIT = 0.8, 40, 3, 7


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "target")


def load(folder: Path, target: Path, **settings: Any) -> Drafter:
    defaults = {"model": folder, "target_model": target, "pages": 32, "page_size": 16, "device": "cpu"}
    return create_drafter(DraftConfig(**(defaults | {"dtype": "float32"} | settings)))


@dataclass
class History:
    """One row as the target would write it: tokens, and the state at each of them."""

    pages: Sequence[int]
    width: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    sent: int = 0

    def commit(self, *tokens: int) -> None:
        generator = torch.Generator().manual_seed(self.seed * 1000 + len(self.tokens))
        for token in tokens:
            self.tokens.append(token)
            self.states.append(torch.randn(self.width, generator=generator))

    def pairs(self) -> tuple[list[Tensor], list[int]]:
        """All slots of a head: each state beside the token that follows it."""
        return self.states[:-1], self.tokens[1:]

    def row(self) -> Row:
        """Those not sent yet; the last again if there are none."""
        start = min(self.sent, len(self.tokens) - 2)
        self.sent, self._start = len(self.tokens) - 1, start
        return Row(self.tokens[start + 1 :], start, self.pages)

    def new_states(self) -> Tensor:
        return torch.stack(self.states[self._start : -1])


def step(
    histories: Sequence[History],
    lengths: Sequence[int],
    kinds: Sequence[int],
    sampling: SamplingRows | None = None,
    dtype: torch.dtype = torch.float32,
    limits: Sequence[int] = (),
) -> DraftStep:
    rows = token_rows(*(history.row() for history in histories))
    return DraftStep(
        step_id=1,
        rows=rows,
        sampling=sampling or sampling_rows(len(histories), temperature=TEMPERATURE, seed=SEED, round_index=ROUND),
        draft_lengths=ints(*lengths),
        proposal_kinds=np.array(kinds, np.uint8),
        support_limit=LIMIT,
        node_limits=ints(*limits),
        features=to_wire(torch.cat([history.new_states() for history in histories]).to(dtype)),
    )


def draw(ids: Tensor, kind: ProposalKind, seed: int, limit: int = LIMIT) -> Any:
    """How the twin draws one token."""

    def drawn(logits: Tensor, position: int) -> tuple[int, dict[int, float]]:
        if kind is GREEDY:
            return int(ids[logits.argmax()]), {}
        q, columns = (logits / TEMPERATURE).softmax(-1), list(range(len(logits)))
        purpose, number = (Purpose.MATCH, 0) if kind is MATCHED else (Purpose.DRAFT, ROUND)
        if kind is SAMPLED:
            columns = sorted(columns, key=lambda v: -float(q[v]))[:limit]
        key = np.array([noise.key(seed, purpose, number, position)])
        winner = noise.race(key, ids[columns].numpy(), q[columns].float().numpy())
        law = {int(ids[v]): float(q[v] / q[columns].sum()) for v in columns} if kind is SAMPLED else {}
        return int(ids[columns[winner]]), law

    return drawn


def split(proposals: Any) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Tokens per row, and supports per row: one for the last slot and one per node."""
    tokens, groups = iter(proposals.token_ids.tolist()), iter(proposals.supports.counts.tolist())
    pairs = iter(zip(proposals.supports.token_ids.tolist(), proposals.support_probs.tolist(), strict=True))
    rows = [[next(tokens) for _ in range(count)] for count in proposals.node_counts]
    laws = []
    if len(proposals.supports.counts):
        laws = [
            [dict(next(pairs) for _ in range(next(groups))) for _ in range(count + 1)]
            for count in proposals.node_counts
        ]
    return rows, laws


KERNELS = ("torch", "native")
INT8 = {"quantize": "int8"}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_chains_equal_the_slow_twin_over_rounds_with_rejections(
    name: str, kernels: str, target_folder: Path, tmp_path: Path
) -> None:
    """Whatever was accepted, the next round's proposal comes from true pairs alone."""
    written = FORMATS[name]
    drafter = load(written.write(tmp_path), target_folder, kernels=kernels)
    assert drafter.info.features == written.features
    assert drafter.info.feature_width == written.width
    twin = Twin(written, load_file(target_folder / "model.safetensors"))
    random = np.random.default_rng(1)
    kinds, lengths = (GREEDY, SAMPLED, MATCHED), (4, 3, 5)
    histories = [History(pages, written.width, i) for i, pages in enumerate([[5, 1, 7], [9, 2], [0, 3, 4]])]
    for history in histories:
        history.commit(*random.integers(4, 280, int(random.integers(2, 20))).tolist())
    for _ in range(4):
        tokens, laws = split(drafter.propose(step(histories, lengths, kinds)))
        for i, history in enumerate(histories):
            states, seen = history.pairs()
            wanted, expected = chain(twin, states, seen, lengths[i], draw(twin.ids, kinds[i], SEED + i))
            assert tokens[i] == wanted
            if kinds[i] is SAMPLED:
                for mine, law in zip(laws[i], [*expected, {}], strict=True):
                    assert mine == pytest.approx(law, abs=1e-4)
            accepted = int(random.integers(0, lengths[i] + 1))
            history.commit(*tokens[i][:accepted], int(random.integers(4, 280)))


def tree_of_the_twin(twin: Twin, history: History, tree: Tree, kind: ProposalKind, seed: int) -> Nodes:
    """The same growth, on logits of every path run from its beginning."""
    states, tokens = history.pairs()
    paths, step_number, root_position = [(states, tokens)], 0, len(tokens) + 1
    places = [0]
    while paths:
        outs = [twin.run(*path, step_number) for path in paths]
        logits = torch.stack([out[0] for out in outs]).float()
        rows = sampling_rows(len(paths), temperature=TEMPERATURE, round_index=ROUND)
        rows = replace(rows, seeds=np.full(len(paths), seed, np.uint64))
        positions = np.full(len(paths), root_position + step_number)
        if kind is GREEDY:
            children = likeliest_children(logits, tree.branches, twin.ids)
        elif kind is MATCHED:
            children = matched_children(logits, rows, positions, tree.branches, twin.ids)
        else:
            children = drawn_children(logits, rows, root_position + np.array(places), tree.branches, LIMIT, twin.ids)
        tree.grow(*children)
        front = tree.frontier
        places = (1 + front.slots).tolist()
        paths = [
            ([*paths[parent][0], outs[parent][1]], [*paths[parent][1], int(token)])
            for parent, token in zip(front.parents.tolist(), front.token_ids.tolist(), strict=True)
        ]
        step_number += 1
    return tree.finish()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_trees_and_chains_of_one_step_equal_the_slow_twin(
    name: str, kernels: str, target_folder: Path, tmp_path: Path
) -> None:
    """Rows of all kinds grow trees beside one that drafts a chain and one that only extends."""
    written, width = FORMATS[name], 3
    drafter = load(written.write(tmp_path), target_folder, kernels=kernels, tree_width=width)
    assert drafter.tree_width == width
    twin = Twin(written, load_file(target_folder / "model.safetensors"))
    random = np.random.default_rng(2)
    kinds, lengths, limits = (GREEDY, SAMPLED, MATCHED, GREEDY, 0), (4, 3, 3, 2, 0), (9, 7, 12, 2, 0)
    tables = [[5, 1, 7], [9, 2, 8], [0, 3, 4], [11, 12], [13, 14]]
    histories = [History(pages, written.width, i) for i, pages in enumerate(tables)]
    for history in histories:
        history.commit(*random.integers(4, 280, int(random.integers(2, 14))).tolist())
    for _ in range(2):
        proposals = drafter.propose(step(histories, lengths, kinds, limits=limits))
        tokens, laws = split(proposals)
        offsets = np.cumsum([0, *proposals.node_counts])
        for i, history in enumerate(histories[:3]):
            made = StaticTree(DEFAULT, limits[i], lengths[i], width) if kinds[i] is SAMPLED else None
            tree = made or DynamicTree(limits[i], lengths[i], width)
            wanted = tree_of_the_twin(twin, history, tree, kinds[i], SEED + i)
            assert tokens[i] == wanted.token_ids.tolist()
            assert proposals.parents[offsets[i] : offsets[i + 1]].tolist() == wanted.parents.tolist()
            assert 1 < len(tokens[i]) <= limits[i]
            if made is not None:
                for mine, law in zip(laws[i], wanted.supports, strict=True):
                    assert mine == pytest.approx(dict(zip(law.token_ids.tolist(), law.probs, strict=True)), abs=1e-4)
        states, seen = histories[3].pairs()
        assert tokens[3] == chain(twin, states, seen, 2, draw(twin.ids, GREEDY, 0))[0]
        assert tokens[4] == []
        for history, drafted in zip(histories, tokens, strict=True):
            history.commit(*drafted[:1], int(random.integers(4, 280)))


def test_the_bits_of_bfloat16_are_taken_for_what_they_are(target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS["own"]
    drafter = load(written.write(tmp_path), target_folder, dtype="bfloat16")
    history = History([0, 1], written.width, 0)
    history.commit(*range(10, 20))
    history.states = [state.bfloat16().float() for state in history.states]
    asked = step([history], [3], [GREEDY], dtype=torch.bfloat16)
    assert asked.features is not None
    assert asked.features.dtype == np.uint16
    history.sent = 0
    wide = step([history], [3], [GREEDY])
    assert drafter.propose(asked).token_ids.tolist() == drafter.propose(wide).token_ids.tolist()


def test_a_step_run_twice_proposes_the_same(target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS["eagle3"]
    drafter = load(written.write(tmp_path), target_folder)
    history = History([0, 1, 2], written.width, 0)
    history.commit(*range(10, 30))
    asked = step([history], [4], [SAMPLED], limits=[12])
    first, second = drafter.propose(asked), drafter.propose(asked)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.support_probs.tobytes() == second.support_probs.tobytes()


def test_pieces_of_a_row_make_the_same_proposal_as_the_whole(target_folder: Path, tmp_path: Path) -> None:
    """A long row comes in steps that only extend; several modules read each other across them."""
    for name in ("own-two-modules", "eagle3"):
        written = FORMATS[name]
        drafter = load(written.write(tmp_path / name), target_folder)
        whole, cut = (History(pages, written.width, 0) for pages in ([0, 1, 2], [3, 4, 5]))
        whole.commit(*range(10, 40))
        for token in range(10, 40):
            cut.commit(token)
            if token in (15, 16, 30):
                assert drafter.propose(step([cut], [0], [0])).node_counts.tolist() == [0]
        cut.states = whole.states
        cut.sent, sent = 0, cut.sent
        drafter.propose(step([cut], [0], [0]))
        cut.sent = sent
        proposals = [drafter.propose(step([history], [4], [GREEDY])) for history in (whole, cut)]
        assert proposals[0].token_ids.tolist() == proposals[1].token_ids.tolist()


@pytest.mark.parametrize(
    "settings", [{"quantize": "int8"}, {"kernels": "torch", "quantize": "int8"}, {"dtype": "bfloat16"}]
)
def test_smaller_weights_draft_too(settings: dict[str, Any], target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS["eagle3"]
    drafter = load(written.write(tmp_path), target_folder, **settings)
    history = History([0, 1, 2], written.width, 0)
    history.commit(*range(10, 30))
    assert drafter.propose(step([history], [4], [GREEDY])).node_counts.tolist() == [4]
    assert drafter.info.model_id.endswith(":int8") == ("quantize" in settings)


def test_another_folder_or_another_way_is_another_drafter(target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS["own"]
    folders = [written.write(tmp_path / str(seed), seed) for seed in (3, 4)]
    plain = [load(folder, target_folder).info.weights_hash for folder in folders]
    other = load(folders[0], target_folder, feedback="pre_norm").info.weights_hash
    assert len({*plain, other}) == 3
    assert load(folders[0], target_folder).info.weights_hash == plain[0]
