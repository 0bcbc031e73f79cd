"""A head behind a real service: what it asks of its peer, and that a step crosses the wire whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, ints, sampling_rows, token_rows
from tiny_heads import FORMATS

from draft_svc.drafters import create_drafter
from draft_svc.server import DraftConfig
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.tensors import to_wire
from pilotfish.steps import DraftStep, ProposalKind

WIDTH = FORMATS["eagle3"].width


def step(dtype: torch.dtype = torch.float32) -> DraftStep:
    """A tree and a chain."""
    generator = torch.Generator().manual_seed(0)
    return DraftStep(
        step_id=1,
        rows=token_rows(Row(range(10, 30), 0, [4, 5, 6]), Row(range(40, 43), 0, [9])),
        sampling=sampling_rows(2, temperature=0.8, seed=3, round_index=2),
        draft_lengths=ints(3, 4),
        proposal_kinds=np.array([ProposalKind.GREEDY, ProposalKind.SAMPLED], np.uint8),
        support_limit=8,
        node_limits=ints(9, 4),
        features=to_wire(torch.randn(23, WIDTH, generator=generator).to(dtype)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_over_the_wire_proposes_what_the_drafter_does(
    dtype: torch.dtype, start_draft: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {"model": FORMATS["eagle3"].write(tmp_path), "target_model": tiny_folder, "tree_width": 4}

    async def scenario() -> Any:
        async with start_draft(**settings) as worker:
            stream = worker.stream()
            grant, capabilities = await stream.open()
            assert grant.features == ("hidden.0", "hidden.1", "hidden.2")
            assert grant.feature_width == WIDTH
            assert capabilities.tree_width == 4
            return await stream.run(step(dtype))

    result = asyncio.run(scenario())
    drafter = create_drafter(DraftConfig(**settings, pages=32, dtype="float32", device="cpu"))
    wanted = drafter.propose(step(dtype))
    for name in ("node_counts", "token_ids", "parents", "support_probs"):
        assert getattr(result, name).tolist() == getattr(wanted, name).tolist()
    assert len(result.parents) == len(result.token_ids) == int(result.node_counts.sum())


def test_a_step_without_features_is_refused(start_draft: Any, tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"model": FORMATS["eagle3"].write(tmp_path), "target_model": tiny_folder}

    async def run(asked: DraftStep) -> None:
        async with start_draft(**settings) as worker:
            stream = worker.stream()
            await stream.open()
            await stream.run(asked)

    with pytest.raises(InvalidArgumentError, match=r"features is absent; must be \[tokens, 192\]"):
        asyncio.run(run(replace(step(), features=None)))
    with pytest.raises(InvalidArgumentError, match=r"features is \(23, 64\); shape must be \(23, 192\)"):
        asyncio.run(run(replace(step(), features=np.zeros((23, 64), np.float32))))
