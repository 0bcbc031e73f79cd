"""Continuous batching for capture: rows of text grow in the pages of the serving runtime, prefill beside decoding.

The same ``PagedModel`` that the target service runs computes the states, packed into ragged batches as there, so that
what a head learns from is what it will be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import InternalError
from pilotfish.noise import Purpose
from pilotfish.runtime import cores, sampling
from pilotfish.runtime.loading import LoadedModel
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.steps import SamplingRows, TokenRows

_PAGE_SIZE = 16
_PREFILL_TOKENS = 256  # of prompts in a step, at most, beside the rows that decode


@dataclass(slots=True)
class Row:
    """A text that is being written."""

    place: int
    """Of its pages, in [0, rows)."""
    token_ids: list[int]
    limit: int
    """Tokens at which it ends, if no end token comes before."""
    end_ids: frozenset[int]
    temperature: float
    top_p: float
    seed: int
    attempt: int = 0
    """Draws of another attempt are other draws."""
    computed: int = field(default=0, init=False)
    """Tokens that the pages hold."""

    @property
    def is_written(self) -> bool:
        return len(self.token_ids) >= self.limit

    @property
    def is_computed(self) -> bool:
        """Whether it is written, and the pages hold the state at every token, the last included."""
        return self.is_written and self.computed == len(self.token_ids)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        if token in self.end_ids:
            self.limit = len(self.token_ids)


class Writer:
    """Writes so many rows at once.

    Args:
        model: the target.
        rows: at once, at most.
        max_len: longest row, in tokens.
        features: states kept at every token.
    """

    def __init__(self, model: LoadedModel, *, rows: int, max_len: int, features: tuple[str, ...]) -> None:
        self._pages_per_row = -(-max_len // _PAGE_SIZE)
        self._model = PagedModel(model, pages=rows * self._pages_per_row, page_size=_PAGE_SIZE, features=features)
        self._vocab_limit = min(model.config.vocab_size, model.tokenizer_vocab_size)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> None:
        """Runs what the rows have that is not computed, within the budget, and draws the next token of those at their
        end.

        Raises:
            InternalError: if the model answers NaN.
        """
        lengths = self._lengths(rows)
        taking = [(row, length) for row, length in zip(rows, lengths, strict=True) if length]
        with cores.working():
            hidden = self._model.extend(self._token_rows(taking))
            ends = np.cumsum([length for _, length in taking])
            for row, length in taking:
                row.computed += length
            drawing = [
                (row, int(end) - 1)
                for (row, _), end in zip(taking, ends, strict=True)
                if not row.is_written and row.computed == len(row.token_ids)
            ]
            if not drawing:
                return
            logits = self._model.logits(
                hidden, torch.tensor([token for _, token in drawing], device=self._model.device)
            )
            sampling.require_finite(logits, "the target model")
            drawn = _draw([row for row, _ in drawing], logits[:, : self._vocab_limit])
        for (row, _), token in zip(drawing, drawn, strict=True):
            row.append(token)

    def features(self, row: Row) -> Tensor:
        """The states at every token, bf16[tokens, feature width].

        Raises:
            InternalError: if one is not finite: whoever trains on it learns nothing any more.
        """
        slots = torch.arange(len(row.token_ids), device=self._model.device) + self._first_slot(row)
        stored = self._model.cache.read_features(slots).to("cpu", torch.bfloat16)
        if not bool(stored.isfinite().all()):
            raise InternalError("the target's states are not finite; is its checkpoint damaged, or dtype too small?")
        return stored

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        """New tokens of each row in this step; prompts wait for one another, rows that decode for nobody."""
        budget, lengths = _PREFILL_TOKENS, []
        for row in rows:
            wanted = len(row.token_ids) - row.computed
            length = wanted if wanted == 1 else min(wanted, budget)
            budget -= length if wanted > 1 else 0
            lengths.append(length)
        return lengths

    def _token_rows(self, taking: Sequence[tuple[Row, int]]) -> TokenRows:
        tokens = [token for row, length in taking for token in row.token_ids[row.computed : row.computed + length]]
        pages = [np.arange(self._pages_per_row) + row.place * self._pages_per_row for row, _ in taking]
        return TokenRows(
            token_ids=np.array(tokens, np.int32),
            lengths=np.array([length for _, length in taking], np.int32),
            starts=np.array([row.computed for row, _ in taking], np.int32),
            page_counts=np.full(len(taking), self._pages_per_row, np.int32),
            page_ids=np.concatenate(pages).astype(np.int32),
        )

    def _first_slot(self, row: Row) -> int:
        return row.place * self._pages_per_row * _PAGE_SIZE


def _draw(rows: Sequence[Row], logits: Tensor) -> list[int]:
    """One token per row, by noise that belongs to the row and the position alone."""
    of_rows = SamplingRows(
        temperatures=np.array([row.temperature for row in rows], np.float32),
        top_ks=np.zeros(len(rows), np.int32),
        top_ps=np.array([row.top_p for row in rows], np.float32),
        min_ps=np.zeros(len(rows), np.float32),
        seeds=np.array([row.seed for row in rows], np.uint64),
        rounds=np.array([row.attempt for row in rows], np.int64),
    )
    positions = np.array([len(row.token_ids) for row in rows], np.int64)
    keys = sampling.draw_keys(of_rows.seeds, Purpose.MATCH, of_rows.rounds, positions)
    return list(map(int, sampling.draw_plain(logits, of_rows, keys).token_ids))
