"""Runs target steps: a forward over ragged rows, then a draw per wanted output."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.errors import FailedPreconditionError, InternalError
from pilotfish.noise import Purpose
from pilotfish.runtime import cores, sampling
from pilotfish.runtime.grammar import DEFAULT_LIMITS, Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.grants import GrantingEngine
from pilotfish.runtime.loading import LoadedModel
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.shaping import Shaper, read_history
from pilotfish.runtime.slots import Longs, node_positions, path_to, require_distinct_slots
from pilotfish.runtime.tensors import to_wire
from pilotfish.steps import (
    DrawRule,
    FeatureRule,
    Grammar,
    Grant,
    Ints,
    SamplingRows,
    ShapingRows,
    TargetResult,
    TargetStep,
    require_range,
)
from target_svc.features import wanted_tokens
from target_svc.logprobs import answer, laws_of


class TargetEngine(GrantingEngine):
    """The target model with its pages. One thread makes all calls, but for those of reading features.

    Args:
        model: loaded.
        pages: pages of the cache.
        page_size: slots per page.
        max_len: longest row, in tokens; None for what the model was made for.
        max_step_tokens: most new tokens in one step.
        features: states stored beside every slot, by the names of types.proto.
        grammar_limits: what grammars may take.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        pages: int,
        page_size: int = 16,
        max_len: int | None = None,
        max_step_tokens: int = 4096,
        features: tuple[str, ...] = (),
        grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self._model = PagedModel(model, pages=pages, page_size=page_size, features=features)
        # Padded ids of the output layer mean nothing, and no tokenizer could write them.
        self._grammars = Grammars(model.tokenizer, waits=True, limits=grammar_limits)
        self._token_limit = min(model.config.vocab_size, model.tokenizer_vocab_size)
        info = model.info(max_len, features, self._model.feature_width)
        info = replace(info, shapes_logits=True, gives_logprobs=True)
        super().__init__(info, pages=pages, page_size=page_size, max_step_tokens=max_step_tokens)

    @torch.inference_mode()
    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        """Runs one step.

        Raises:
            InvalidArgumentError: on a step that breaks the contract; nothing was written.
            InternalError: if the model answers NaN.
        """
        started = time.perf_counter_ns()
        step.validate(grant)
        require_distinct_slots(step.rows, grant.page_size)
        with cores.working():
            hidden = self._model.extend(step.rows)

            def logits_of(nodes: Ints) -> Tensor:
                logits = self._model.logits(hidden, self._index(nodes))
                try:
                    sampling.require_finite(logits, "the target model")
                except InternalError:
                    self._model.cache.scrub(step.rows.page_ids)
                    raise
                return logits

            logits = logits_of(step.output_nodes)
            laws = None if step.logprobs is None else laws_of(step.logprobs, logits, self._token_limit)
            draws = self._draw(step, logits)  # which shapes the logits
            logprobs = None if laws is None else answer(step, draws.token_ids, laws, logits_of, self._token_limit)
        features = None
        if hidden.features is not None and (step.feature_rules > FeatureRule.NONE).any():
            wanted = wanted_tokens(step, draws.token_ids)
            features = to_wire(hidden.features.index_select(0, torch.from_numpy(wanted).to(self._model.device)))
        return TargetResult(
            step_id=step.step_id,
            token_ids=draws.token_ids,
            tail_masses=draws.tail_masses,
            support_probs=draws.support_probs,
            features=features,
            logprobs=logprobs,
            compute_us=(time.perf_counter_ns() - started) // 1000,
        )

    def compile_grammar(self, grammar: Grammar) -> Future[None]:
        """Makes a grammar ready for steps; see ``Grammars.compile``. From any thread."""
        ends, known = np.array(grammar.end_token_ids), f"must be in [0, {self._token_limit})"
        require_range(ends, "grammar.end_token_ids", 0, self._token_limit - 1, known)
        return self._grammars.compile(grammar)

    def features_per_chunk(self, chunk_bytes: int) -> int:
        """How many slots' features fit into so many bytes; at least 1."""
        return max(chunk_bytes // max(self._model.feature_width * self._model.decoder.dtype.itemsize, 1), 1)

    @torch.inference_mode()
    def read_features(self, incarnation: int, slots: Ints) -> npt.NDArray[np.generic]:
        """Stored features ``[slots, feature_width]``, bfloat16 as its bits in uint16; from any thread.

        Of a slot that a step is just writing to, the values may be torn.

        Raises:
            FailedPreconditionError: if none are stored.
            NotFoundError: if no stream is open with that incarnation.
            InvalidArgumentError: on a slot outside its grant.
        """
        if not self._model.features:
            raise FailedPreconditionError("this target stores no features; start it with --features")
        grant = self._grants.find(incarnation)
        first = grant.first_page * grant.page_size
        last = first + grant.page_count * grant.page_size - 1
        require_range(slots, "slots", first, last, f"this stream was granted slots [{first}, {last}]")
        cache = self._model.cache
        if cache.features is not None and cache.device.type == "cpu":
            # numpy copies in this thread; torch would wake a team of its own beside that of the step under way.
            return to_wire(cache.features.flatten(0, 1))[slots]
        return to_wire(cache.read_features(self._index(slots)))

    def _draw(self, step: TargetStep, logits: Tensor) -> sampling.OutsideDraws:
        if self._token_limit < logits.shape[1]:
            logits[:, self._token_limit :] = -torch.inf
        if step.sampling.shaping is None:
            return self._draw_shaped(step, logits)
        stuck = self._shape(step, step.sampling.shaping, logits)
        return sampling.nothing_follows(self._draw_shaped(step, logits), step.supports, stuck)

    def _draw_shaped(self, step: TargetStep, logits: Tensor) -> sampling.OutsideDraws:
        if not step.sampling.temperatures.any() and not step.supports.counts.any():
            return sampling.draw_greedy(logits)
        rows = np.searchsorted(step.rows.row_offsets, step.output_nodes, side="right") - 1
        of_outputs = sampling.take_rows(step.sampling, rows)
        positions = node_positions(step.rows)[step.output_nodes] + 1
        keys = _keys(of_outputs, step.draw_rules[rows], positions)
        if not step.supports.counts.any():
            return sampling.draw_plain(logits, of_outputs, keys)
        return sampling.draw_outside(sampling.probabilities(logits, of_outputs), keys, step.supports)

    def _shape(self, step: TargetStep, shaping: ShapingRows, logits: Tensor) -> Longs:
        """Shapes the logits of the step's outputs, each by the path that leads to its token; those left without one."""
        rows, outputs = step.rows, step.output_nodes
        starts, tokens = rows.starts.astype(np.int64), self._model.cache.token_ids
        shape = Shaper(shaping, starts, lambda row: read_history(tokens, rows, row, int(starts[row])), self._grammars)
        of_outputs = np.searchsorted(rows.row_offsets, outputs, side="right") - 1
        return shape(logits, of_outputs, lambda output: path_to(rows, int(of_outputs[output]), int(outputs[output])))

    def _index(self, values: Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._model.device)


def _keys(rows: SamplingRows, rules: npt.NDArray[np.uint8], positions: Longs) -> Longs:
    """MATCH noise leaves the round out, so that the text of a seed does not depend on how rounds fell."""
    shared = sampling.draw_keys(rows.seeds, Purpose.MATCH, np.zeros_like(rows.rounds), positions)
    fresh = sampling.draw_keys(rows.seeds, Purpose.OUTSIDE, rows.rounds, positions)
    return np.where(rules == DrawRule.MATCH, shared, fresh)
