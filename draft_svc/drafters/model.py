"""A small language model of the target's tokenizer drafts chains."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.chains import draft_chains
from draft_svc.drafters.nodes import collect
from pilotfish.runtime import cores
from pilotfish.runtime.grammar import DEFAULT_LIMITS, Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import LoadedModel
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.shaping import shaper_of_drafts
from pilotfish.runtime.slots import Longs
from pilotfish.steps import DraftStep, Ints, ProposalKind, TokenRows


class ModelDrafter(Drafter):
    """See the module.

    Args:
        model: loaded.
        pages: pages of the cache.
        page_size: slots per page.
        max_len: longest row, in tokens; None for what the model was made for.
        grammar_limits: what grammars may take.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED)

    def __init__(
        self,
        model: LoadedModel,
        *,
        pages: int,
        page_size: int = 16,
        max_len: int | None = None,
        grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self._model = PagedModel(model, pages=pages, page_size=page_size)
        # Padded ids of the output layer mean nothing to a target that pads otherwise.
        self._vocab_limit = min(model.config.vocab_size, model.tokenizer_vocab_size)
        self._info = model.info(max_len)
        self._grammars = Grammars(model.tokenizer, waits=False, limits=grammar_limits)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> Proposals:
        with cores.working():
            run = _Run(self._model, step.rows, self._vocab_limit)
            shaper = shaper_of_drafts(step, self._model.cache.token_ids, self._grammars)
            nodes = draft_chains(step, np.flatnonzero(step.draft_lengths > 0), run, shaper)
        return collect(step, nodes)

    def scrub(self, page_ids: Ints) -> None:
        self._model.cache.scrub(page_ids)


class _Run:
    """See ``chains.Run``."""

    ahead = 0
    token_ids: Tensor | None = None

    def __init__(self, model: PagedModel, rows: TokenRows, vocab_limit: int) -> None:
        self._model, self._vocab_limit = model, vocab_limit
        self._hidden = model.extend(rows)

    def logits(self, tokens: Longs) -> Tensor:
        logits = self._model.logits(self._hidden, torch.from_numpy(tokens).to(self._model.device))
        return logits[:, : self._vocab_limit]

    def advance(self, rows: TokenRows, parents: Longs) -> _Run:
        return _Run(self._model, rows, self._vocab_limit)
