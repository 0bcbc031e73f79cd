"""A head that checks whatever it is fed, and knows what the target will write."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import load_reference

from draft_svc.drafters import Drafter, Proposals
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import LoadedModel
from pilotfish.steps import DraftStep, ProposalKind


class OracleHead(Drafter):
    """Wants the embedding and the last state of every token. The first tells it which token stands there, and the
    second must be what Hugging Face computes for the whole history, in every slot of every row of every step.

    Proposes what Hugging Face writes greedily, with every ``spoil``-th token wrong; where a tree is asked for, each
    node is preceded by a wrong sibling. All slots that it may use meanwhile are spoiled.

    Args:
        folder: of the target.
        target: the same, loaded.
        page_size: slots per page.
        spoil: 0 for never.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.MATCHED)
    tree_width = 2

    def __init__(self, folder: Path, target: LoadedModel, page_size: int = 16, spoil: int = 0) -> None:
        self._reference, self._page_size, self._spoil = load_reference(folder), page_size, spoil
        self._embeddings = self._reference.get_input_embeddings().weight.detach()
        width = self._embeddings.shape[1]
        plain = target.info(None)
        self._info = ModelInfo(
            "oracle", "weights", plain.tokenizer_hash, plain.vocab_size, plain.max_len, ("hidden.0", "final"), 2 * width
        )
        self._pairs: dict[int, tuple[torch.Tensor, int] | None] = {}
        self.held = 0
        self.fed = 0
        self.has_run = threading.Event()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> Proposals:
        assert step.features is not None
        assert step.features.dtype == np.float32
        limits = step.node_limits if len(step.node_limits) else step.draft_lengths
        counts: list[int] = []
        nodes: list[int] = []
        parents: list[int] = []
        first = page = 0
        for row, (start, length) in enumerate(zip(step.rows.starts.tolist(), step.rows.lengths.tolist(), strict=True)):
            pages = step.rows.page_ids[page : page + step.rows.page_counts[row]].tolist()
            slots = [id_ * self._page_size + offset for id_ in pages for offset in range(self._page_size)]
            for i in range(length):
                features = torch.tensor(step.features[first + i])
                self._pairs[slots[start + i]] = features, int(step.rows.token_ids[first + i])
            history = self._history(slots[: start + length])
            used = int(step.draft_slots(self.tree_width)[row])
            self._pairs |= dict.fromkeys(slots[start + length : start + length + used])
            drafted, above = self._draft(history, int(step.draft_lengths[row]), int(limits[row]))
            counts.append(len(drafted))
            nodes += drafted
            parents += above
            first, page, self.fed = first + length, page + len(pages), self.fed + length
        self.has_run.set()
        ints = [np.array(values, np.int32) for values in (counts, nodes, parents)]
        return Proposals(*ints)

    def _history(self, slots: list[int]) -> list[int]:
        """The row's tokens, once every pair is found to be the right one."""
        pairs = [self._pairs.get(slot) for slot in slots]
        assert None not in pairs, "a slot holds what was drafted"
        width = self._embeddings.shape[1]
        states = torch.stack([pair[0] for pair in pairs if pair is not None])
        own = torch.cdist(states[:, :width], self._embeddings).argmin(dim=1).tolist()
        following = [pair[1] for pair in pairs if pair is not None]
        assert own[1:] == following[:-1], "a feature stands beside another token than the one that follows it"
        tokens = [*own, following[-1]]
        wanted = self._reference.model(torch.tensor([own])).last_hidden_state[0]
        torch.testing.assert_close(states[:, width:], wanted, atol=2e-4, rtol=0)
        self.held += len(slots)
        return tokens

    def _draft(self, history: list[int], length: int, limit: int) -> tuple[list[int], list[int]]:
        nodes: list[int] = []
        parents: list[int] = []
        parent = -1
        for left in range(length, 0, -1):  # of the path, which must fit before any sibling
            likeliest: Any = self._reference(torch.tensor([history])).logits[0, -1].argmax()
            token = int(likeliest)
            if self._spoil and len(history) % self._spoil == 0:
                token = 4 + token % 200
            siblings = [5 + token % 200, token] if len(nodes) + left < limit else [token]
            nodes += siblings
            parents += [parent] * len(siblings)
            parent = len(nodes) - 1
            history = [*history, token]
        return nodes, parents
