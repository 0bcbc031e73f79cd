"""Drafts with Medusa heads: all that they read is the target's state at a row's last slot. Only tokens are cached.

Head j is asked for the (j+1)-th draft token, whatever the tokens before it are, so that a proposal is never longer
than there are heads. (``medusa`` says what a head computes.) All ways of proposing are exact: the likeliest tokens
and the race of the target's own draws are functions of the past, and drawn tokens come from a q that is told; that q
ignores the path is no matter, only less right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.growth import draft
from draft_svc.drafters.heads import to_tensor
from draft_svc.drafters.tree_shapes import MEDUSA, Shape
from pilotfish.runtime import cores
from pilotfish.runtime.grammar import DEFAULT_LIMITS, Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.models.layers import OutputHead, Projection
from pilotfish.runtime.shaping import shaper_of_drafts
from pilotfish.runtime.slots import Longs, TreeRows, written_slots
from pilotfish.steps import DraftStep, ProposalKind, TokenRows


class MedusaHeads:
    """The heads of one checkpoint.

    Args:
        blocks: of each head.
        outputs: output layer of each head; perhaps the same one.
        token_ids: target id of every column of the logits, i64[columns]; None where column v is token v.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Projection]], outputs: Sequence[OutputHead], token_ids: Tensor | None
    ) -> None:
        self._blocks, self._outputs, self.token_ids = blocks, outputs, token_ids

    def __len__(self) -> int:
        return len(self._blocks)

    def logits(self, head: int, states: Tensor) -> Tensor:
        """Logits f32[n, columns] of a head on states [n, hidden]."""
        for block in self._blocks[head]:
            states = states + functional.silu(block(states))
        return self._outputs[head].logits(states)


class MedusaDrafter(Drafter):
    """See the module.

    Args:
        heads: loaded.
        tokenizer: folder of its tokenizer.json.
        info: what an orchestrator is told.
        dtype: of the states, as the heads read them.
        device: of the heads.
        pages: of tokens.
        page_size: slots per page.
        tree_width: most nodes with children on a level of a tree; 0: chains only.
        shape: of all trees; None: they grow to the likeliest nodes, and sampled ones are ``MEDUSA``.
        grammar_limits: what grammars may take.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED)

    def __init__(
        self,
        heads: MedusaHeads,
        tokenizer: Path,
        info: ModelInfo,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pages: int,
        page_size: int = 16,
        tree_width: int = 0,
        shape: Shape | None = None,
        grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self._heads, self._info, self._dtype, self._device = heads, info, dtype, device
        self.tree_width = tree_width if shape is None or not tree_width else shape.width
        self._shape = shape
        self._grammars = Grammars(tokenizer, waits=False, limits=grammar_limits)
        self._token_ids = torch.zeros(pages, page_size, dtype=torch.int32)  # what penalties and grammars go by

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> Proposals:
        features = step.features
        assert features is not None
        # No draft token is further on than the last head; fewer nodes than asked for are always allowed.
        step = replace(step, draft_lengths=np.minimum(step.draft_lengths, len(self._heads)))
        with cores.working():
            ends = step.rows.row_offsets[1:] - 1
            states = to_tensor(features[ends]).to(self._device, self._dtype)
            row_of_token = np.repeat(np.arange(len(ends)), step.rows.lengths)
            run = _Run(self._heads, 0, states, row_of_token)
            self._cache_tokens(step.rows)
            shaper = shaper_of_drafts(step, self._token_ids, self._grammars, ahead=run.ahead, columns=run.token_ids)
            return draft(step, run, width=self.tree_width, shape=self._shape, drawn=MEDUSA, shaper=shaper)

    def _cache_tokens(self, rows: TokenRows) -> None:
        tokens = self._token_ids.numpy().reshape(-1)
        for source, place in rows.slot_copies.tolist():
            tokens[place] = tokens[source]
        tokens[written_slots(rows, self._token_ids.shape[1])] = rows.token_ids


class _Run:
    """See ``growth.TreeRun``: to run a draft token is to turn to the next head.

    Args:
        heads: all.
        turn: of the head that predicts.
        states: at the end of each row, [rows, hidden].
        rows: of each token of this run, i64[tokens].
    """

    ahead = 1

    def __init__(self, heads: MedusaHeads, turn: int, states: Tensor, rows: Longs) -> None:
        self._heads, self._turn, self._states, self._rows = heads, turn, states, rows
        self.token_ids = heads.token_ids

    def logits(self, tokens: Longs) -> Tensor:
        rows = torch.from_numpy(self._rows[tokens]).to(self._states.device)
        return self._heads.logits(self._turn, self._states[rows])

    def distinct(self, tokens: Longs) -> tuple[Longs, Longs]:
        _, firsts, shared = np.unique(self._rows[tokens], return_index=True, return_inverse=True)
        return firsts, shared

    def advance(self, rows: TokenRows, parents: Longs) -> _Run:
        return _Run(self._heads, self._turn + 1, self._states, self._rows[parents])

    def advance_trees(self, rows: TreeRows, parents: Longs) -> _Run:
        return _Run(self._heads, self._turn + 1, self._states, self._rows[parents])
