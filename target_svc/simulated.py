"""The target without weights: real steps, real checks, a hash for a model, and a profile's time."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pilotfish.errors import FailedPreconditionError
from pilotfish.noise import Purpose, keys
from pilotfish.runtime.grants import GrantingEngine
from pilotfish.runtime.slots import Longs, node_positions, require_distinct_slots
from pilotfish.simulate.law import Law, draw, draw_outside, no_supports, shares
from pilotfish.simulate.model import SimulatedModel, read_model
from pilotfish.simulate.pages import HashedPages
from pilotfish.simulate.profile import Profile, load_profile, sleep_until
from pilotfish.steps import DrawRule, Floats, Grammar, Grant, Ints, TargetResult, TargetStep, require

if TYPE_CHECKING:
    from target_svc.server import TargetConfig


class SimulatedTarget(GrantingEngine):
    """A target engine; see ``target_svc.engine``.

    Args:
        profile: how long steps take.
        model: what the folder says.
        pages: pages of the cache.
        page_size: slots per page.
        max_step_tokens: most new tokens in one step.
    """

    def __init__(
        self, profile: Profile, model: SimulatedModel, *, pages: int, page_size: int = 16, max_step_tokens: int = 4096
    ) -> None:
        self._cost, self._law = profile.target, Law(model.token_limit)
        self._pages = HashedPages(pages, page_size)
        super().__init__(model.info, pages=pages, page_size=page_size, max_step_tokens=max_step_tokens)

    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        """Runs one step, for as long as the profile says.

        Raises:
            InvalidArgumentError: on a step that breaks the contract; nothing was written.
            InternalError: if a row's cache is not what the row believes.
        """
        started, rows = time.perf_counter(), step.rows
        step.validate(grant)
        require(step.sampling.shaping is None, "sampling.shaping", "given", "a simulated target has no logits")
        require_distinct_slots(rows, grant.page_size)
        prefixes = self._pages.extend(rows)
        token_ids, tail_masses, support_probs = self._draw(step, prefixes[step.output_nodes])
        sleep_until(started, self._cost.forward_us(len(rows.token_ids), int(rows.starts.sum())))
        return TargetResult(
            step_id=step.step_id,
            token_ids=token_ids,
            tail_masses=tail_masses,
            support_probs=support_probs,
            compute_us=int((time.perf_counter() - started) * 1e6),
        )

    def compile_grammar(self, grammar: Grammar) -> Future[None]:
        """Raises ``FailedPreconditionError``: there are no logits to mask."""
        raise FailedPreconditionError("a simulated target follows no grammars")

    def features_per_chunk(self, chunk_bytes: int) -> int:
        """See ``TargetEngine``."""
        return chunk_bytes

    def read_features(self, incarnation: int, slots: Ints) -> npt.NDArray[np.generic]:
        """Raises ``FailedPreconditionError``: there are no hidden states."""
        raise FailedPreconditionError("a simulated target stores no features")

    def _draw(self, step: TargetStep, prefixes: Longs) -> tuple[Ints, Floats, Floats]:
        firsts = self._law.target(prefixes)
        of_rows = np.searchsorted(step.rows.row_offsets, step.output_nodes, side="right") - 1
        sampling = step.sampling
        if not sampling.temperatures.any() and not step.supports.counts.any():
            return firsts.astype(np.int32), *no_supports(len(firsts))
        p = shares(sampling)[of_rows]
        seeds, positions = sampling.seeds[of_rows], node_positions(step.rows)[step.output_nodes] + 1
        rounds = sampling.rounds[of_rows]
        shared = keys(seeds, Purpose.MATCH, np.zeros_like(rounds), positions)
        fresh = keys(seeds, Purpose.OUTSIDE, rounds, positions)
        noise = np.where(step.draw_rules[of_rows] == DrawRule.MATCH, shared, fresh)
        if not step.supports.counts.any():
            return draw(self._law, firsts, p, noise), *no_supports(len(firsts))
        return draw_outside(self._law, firsts, p, noise, step.supports)


def create_simulated(config: TargetConfig, profile: str) -> SimulatedTarget:
    """The engine that ``--simulate PROFILE`` asks for.

    Raises:
        NotFoundError: if there is no such profile, or the model folder lacks a file.
        InvalidArgumentError: if one of them is broken, or a setting was given that only a real model has.
    """
    config.refuse_with_simulate(
        "device", "dtype", "quantize", "kernels", "layers", "threads", "features", "gpu_memory_utilization"
    )
    return SimulatedTarget(
        load_profile(profile),
        read_model(config.model, config.name or f"simulated-{Path(profile).stem}", config.max_len),
        pages=config.page_count,
        page_size=config.page_size,
        max_step_tokens=config.max_step_tokens,
    )
