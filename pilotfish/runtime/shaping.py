"""What requests have done to their logits before anything is drawn: one place, for the target and every drafter.

What is done, and in which order, ``ShapingRows`` in types.proto says; temperature and what cuts the law off come
after it (``sampling.probabilities``). The order is that of vLLM and, for what it has, of Hugging Face's ``generate``:
arXiv 1909.05858 (CTRL), section 4.1, has the repetition penalty, the API reference of OpenAI the other two.

A proposal has many nodes, and each has a history of its own: the tokens that its row has cached, the same for all of
them, and its path, the tokens that lead to it from there. Histories come from the pages, so that a step need not
bring them. Drafters shape their q by the very same function: acceptance stays what it is without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.runtime.grammar import Grammars
from pilotfish.runtime.slots import Longs
from pilotfish.steps import DraftStep, Grammar, Ints, ShapingRows, TokenRows

_LARGEST = float(np.finfo(np.float32).max)

Path = Callable[[int], Sequence[int]]
"""Tokens that lead to a node from what its row has cached, its own the last; asked for nodes of rows that ask only."""


def read_history(token_ids: Tensor, rows: TokenRows, row: int, count: int) -> Ints:
    """Tokens in the first slots of a row of a step. i32[count].

    Args:
        token_ids: of all slots, i32[pages, page_size].
        rows: of the step.
        row: which.
        count: slots, all written.
    """
    first, pages = int(rows.page_counts[:row].sum()), -(-count // token_ids.shape[1])
    index = torch.from_numpy(rows.page_ids[first : first + pages].astype(np.int64)).to(token_ids.device)
    tokens: Ints = token_ids.index_select(0, index).flatten()[:count].cpu().numpy()
    return tokens


def shaper_of_drafts(
    step: DraftStep, token_ids: Tensor, grammars: Grammars, *, ahead: int = 0, columns: Tensor | None = None
) -> Shaper | None:
    """What shapes the logits of a draft step's nodes, once its own tokens are cached; None if no row asks.

    Args:
        step: validated.
        token_ids: of all slots, i32[pages, page_size].
        grammars, ahead, columns: as ``Shaper`` takes them.
    """
    shaping, rows = step.sampling.shaping, step.rows
    if shaping is None:
        return None
    cached = rows.starts.astype(np.int64) + rows.lengths
    read = partial(_read_cached, token_ids, rows, cached)
    return Shaper(shaping, cached, read, grammars, ahead=ahead, columns=columns)


def _read_cached(token_ids: Tensor, rows: TokenRows, cached: Longs, row: int) -> Ints:
    return read_history(token_ids, rows, row, int(cached[row]))


class Shaper:
    """Shapes the logits of a step's nodes.

    Args:
        shaping: of the step.
        cached: tokens that each row of the step has before all its nodes, i64[rows].
        read: these tokens of a row; asked at most once for each.
        grammars: of the tokenizer.
        ahead: of the token in a row's first slot, its index in the row: 1 where slot i holds t_{i+1}, else 0.
        columns: token of every column of the logits, i64[columns]; None where column v is token v.
    """

    def __init__(
        self,
        shaping: ShapingRows,
        cached: Longs,
        read: Callable[[int], Ints],
        grammars: Grammars,
        *,
        ahead: int = 0,
        columns: Tensor | None = None,
    ) -> None:
        self._columns = _Columns(columns)
        self._rows = {
            row: _Row(shaping, place, self._columns, int(cached[row]) + ahead, partial(read, row), grammars)
            for place, row in enumerate(shaping.rows.tolist())
        }

    def shapes(self, rows: Longs) -> bool:
        """Whether any of these rows asks for anything."""
        return any(row in self._rows for row in rows.tolist())

    def __call__(self, logits: Tensor, rows: Longs, path: Path) -> Longs:
        """Shapes logits f32[n, columns] of nodes in place.

        Args:
            logits: of the nodes.
            rows: of the step that each node is of, i64[n].
            path: of each node.

        Returns:
            Nodes that have no token left, i64[m]. Their logits are as they were.
        """
        left_empty = []
        self._columns.width = logits.shape[1]
        for number in np.unique(rows).tolist():
            if (row := self._rows.get(number)) is None:
                continue
            nodes = np.flatnonzero(rows == number)
            index = torch.from_numpy(nodes).to(logits.device)
            shaped = row.shape(logits.index_select(0, index), [path(node) for node in nodes.tolist()])
            is_empty = (shaped.amax(-1) == -torch.inf).cpu().numpy()
            if is_empty.any():
                left_empty.append(nodes[is_empty])
                kept = torch.from_numpy(np.flatnonzero(~is_empty)).to(logits.device)
                index, shaped = index[kept], shaped[kept]
            logits.index_copy_(0, index, shaped)
        return np.concatenate(left_empty) if left_empty else np.zeros(0, np.int64)


class _Columns:
    """Columns of token ids; ids that no column has are passed over."""

    def __init__(self, token_ids: Tensor | None) -> None:
        self.width = 0
        self._token_ids = token_ids

    def of(self, token_ids: npt.NDArray[Any]) -> tuple[Longs, npt.NDArray[np.bool_]]:
        """Columns i64[m] of those ids that have one, and which these are, bool[n]."""
        ids = token_ids.astype(np.int64)
        if self._token_ids is None:
            has_one = ids < self.width
            return ids[has_one], has_one
        inverse = self._inverse
        columns = np.where(ids < len(inverse), inverse[np.minimum(ids, len(inverse) - 1)], -1)
        return columns[columns >= 0], columns >= 0

    @cached_property
    def _inverse(self) -> Longs:
        """Column of every id up to the highest that has one, else -1."""
        assert self._token_ids is not None
        ids = self._token_ids.cpu().numpy()
        inverse = np.full(int(ids.max()) + 1, -1, np.int64)
        inverse[ids] = np.arange(len(ids))
        return inverse


@dataclass(frozen=True, slots=True)
class _History:
    """What a row has cached: its distinct tokens, and how often each stands in the completion. i64[n], f32[n]."""

    token_ids: Longs
    counts: npt.NDArray[np.float32]


class _Row:
    """What one row asks for.

    Args:
        shaping: of the step.
        place: of the row among those that ask.
        columns: of token ids.
        length: tokens of the row before all nodes, those that are not cached included.
        read: gives those that are cached, the last ones.
        grammars: of the tokenizer.
    """

    def __init__(
        self,
        shaping: ShapingRows,
        place: int,
        columns: _Columns,
        length: int,
        read: Callable[[], Ints],
        grammars: Grammars,
    ) -> None:
        self._columns, self._length, self._read, self._grammars = columns, length, read, grammars
        self._prompt_length = int(shaping.prompt_lengths[place])
        self._repetition = float(shaping.repetition_penalties[place])
        self._frequency = float(shaping.frequency_penalties[place])
        self._presence = float(shaping.presence_penalties[place])
        biased = _group(shaping.bias_counts, place)
        self._bias_ids, self._biases = shaping.bias_token_ids[biased], shaping.bias_values[biased]
        self._allowed_ids = shaping.allowed_token_ids[_group(shaping.allowed_counts, place)]
        self._end_ids = shaping.end_token_ids[_group(shaping.end_counts, place)]
        self._min_tokens = int(shaping.min_tokens[place])
        grammar = int(shaping.grammar_indices[place]) if shaping.grammars else -1
        self._grammar = shaping.grammars[grammar] if grammar >= 0 else None

    def shape(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """The shaped logits of nodes, f32[n, columns]; the tensor given may be changed, too."""
        if self._grammar is not None:
            self._keep_to_grammar(self._grammar, logits, paths)
        if len(self._allowed_ids):
            logits = self._only_allowed(logits)
        if len(self._bias_ids):
            columns, has_one = self._columns.of(self._bias_ids)
            values = torch.from_numpy(self._biases[has_one].astype(np.float32)).to(logits.device)
            logits.index_add_(1, _index(columns, logits), values.expand(len(logits), -1))
        self._ban_early_ends(logits, paths)
        if self._repetition != 1 or self._frequency or self._presence:
            self._penalise(logits, paths)
        return logits

    def _keep_to_grammar(self, grammar: Grammar, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        # Where the prompt is not yet cached whole, the paths still begin in it.
        missing = max(self._prompt_length - self._length, 0)
        masks = self._grammars.masks(grammar, self._cached_completion, [path[missing:] for path in paths])
        if masks is None:
            return
        columns, has_one = self._columns.of(np.arange(masks.shape[1]))
        follows = np.zeros((len(paths), logits.shape[1]), np.bool_)
        follows[:, columns] = masks[:, has_one]
        logits.masked_fill_(torch.from_numpy(~follows).to(logits.device), -torch.inf)

    def _only_allowed(self, logits: Tensor) -> Tensor:
        columns = _index(self._columns.of(self._allowed_ids)[0], logits)
        return torch.full_like(logits, -torch.inf).index_copy_(1, columns, logits.index_select(1, columns))

    def _ban_early_ends(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        completed = np.array([max(self._length + len(path) - self._prompt_length, 0) for path in paths])
        early = np.flatnonzero(completed < self._min_tokens)
        columns = self._columns.of(self._end_ids)[0]
        if len(early) and len(columns):
            logits[_index(early, logits)[:, None], _index(columns, logits)] = -torch.inf

    def _penalise(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        history = self._history
        drafted = [np.asarray(path, np.int64) for path in paths]
        ids = np.unique(np.concatenate((history.token_ids, *drafted)))
        seen, counts = np.zeros((len(paths), len(ids)), np.bool_), np.zeros((len(paths), len(ids)), np.float32)
        cached = ids.searchsorted(history.token_ids)
        seen[:, cached], counts[:, cached] = True, history.counts
        for node, path in enumerate(drafted):
            places = ids.searchsorted(path)
            seen[node, places] = True
            np.add.at(counts[node], places[max(self._prompt_length - self._length, 0) :], 1)
        columns, has_one = self._columns.of(ids)
        index = _index(columns, logits)
        times = torch.from_numpy(counts[:, has_one]).to(logits.device)
        own = logits.index_select(1, index)
        if self._repetition != 1:
            penalised = torch.where(own > 0, own / self._repetition, own * self._repetition)
            penalised.clamp_(max=_LARGEST)  # a penalty next to 0 overflows, and infinite logits have no law
            own = torch.where(torch.from_numpy(seen[:, has_one]).to(logits.device), penalised, own)
        own = own - self._frequency * times - self._presence * (times > 0)
        logits.index_copy_(1, index, own)

    @cached_property
    def _history(self) -> _History:
        ids, places = np.unique(self._cached, return_inverse=True)
        completion = places[len(places) - len(self._cached_completion) :]
        return _History(ids.astype(np.int64), np.bincount(completion, minlength=len(ids)).astype(np.float32))

    @cached_property
    def _cached(self) -> Ints:
        return self._read()

    @property
    def _cached_completion(self) -> Ints:
        first = self._length - len(self._cached)  # index in the row of the first token that is cached
        return self._cached[max(self._prompt_length - first, 0) :]


def _group(counts: Ints, place: int) -> slice:
    """Where the elements of one group of ragged ones lie."""
    first = int(counts[:place].sum())
    return slice(first, first + int(counts[place]))


def _index(values: Longs, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
