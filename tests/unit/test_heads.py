"""Heads of every format, driven step by step: what they propose is what their slow twin proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
) -> DraftStep:
    rows = token_rows(*(history.row() for history in histories))
    return DraftStep(
        step_id=1,
        rows=rows,
        sampling=sampling or sampling_rows(len(histories), temperature=TEMPERATURE, seed=SEED, round_index=ROUND),
        draft_lengths=ints(*lengths),
        proposal_kinds=np.array(kinds, np.uint8),
        support_limit=LIMIT,
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
