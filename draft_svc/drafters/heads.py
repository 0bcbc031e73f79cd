"""Drafts with a head on the target's hidden states: what MTP, EAGLE and EAGLE-3 have in common.

Slot i of a head holds (h_i, t_{i+1}), the target's state at token i beside the token that follows, and
predicts t_{i+2}. A step brings the pairs of tokens that were committed since the last one, with TRUE states;
the logits of a row's last slot already give the first draft token. Each further draft token is the pair of
the head's own output and the token just drafted, one slot on. Whatever was cached for drafted tokens is
overwritten by the true pairs of the next step: a head that keeps its own guesses in the place of states loses
a tenth of its acceptance (vllm-project/vllm#14649).

Several modules (``HeadSpec.modules``) draft by turns: draft step j asks module j mod D. Module m > 0 reads, in
the place of a state of the target, what module m - 1 put out one slot before, as it was trained to (arXiv
2412.19437, equation 21; slots here are one on for each module, so that all hold the same token in the same
slot). At slot 0, before which there is none, it reads that of slot 0. All modules run all slots, so that each
has the whole row in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.growth import draft
from draft_svc.drafters.head_spec import EMBEDDINGS, HEAD, HeadSpec
from draft_svc.drafters.tree_shapes import Shape
from pilotfish.runtime import cores
from pilotfish.runtime.batch import Batch, build_batch, build_tree_batch
from pilotfish.runtime.grammar import DEFAULT_LIMITS, Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.models.layers import Embedding, Kernels, Layers, OutputHead
from pilotfish.runtime.shaping import shaper_of_drafts
from pilotfish.runtime.slots import Longs, TreeRows, slots_at, within
from pilotfish.steps import DraftStep, Ints, ProposalKind, TokenRows


class Head(Protocol):
    """What one kind of head computes. Tensors of states and outputs are [tokens, width]."""

    token_ids: Tensor | None
    """Target id of every column of the logits, i64[columns]; None where column v is token v."""
    layers: Sequence[Layers]
    """Of each module."""

    @property
    def embed(self) -> Embedding:
        """Of tokens."""

    def inputs(self, module: int, embeddings: Tensor, states: Tensor, *, is_own: bool) -> tuple[Tensor, Tensor | None]:
        """What the module's layers are given: the residual stream, and what their attention reads beside it.

        Args:
            module: which.
            embeddings: of the tokens.
            states: beside them, as the target sends its features, or from ``state``.
            is_own: the latter.
        """

    def state(self, module: int, out: Tensor) -> Tensor:
        """What stands for the next slot's state, from the output of the module's layers."""

    def logits(self, module: int, out: Tensor) -> Tensor:
        """Logits f32[n, columns] from the output of the module's layers."""


class Parts:
    """Weights of a head while it is built; what has become part of it is no longer here.

    Args:
        spec: what the checkpoint holds.
        weights: by the names of ``head_spec``, all of the kernels' dtype on their device.
        kernels: make the parts.
        token_ids: see ``Head``; the output layer has these rows.
    """

    def __init__(
        self, spec: HeadSpec, weights: dict[str, Tensor], kernels: Kernels, token_ids: Tensor | None = None
    ) -> None:
        self.kernels, self.token_ids = kernels, token_ids
        self._spec, self._weights = spec, weights

    def take(self, name: str) -> Tensor:
        """The tensor of that name, which is there."""
        return self._weights.pop(name)

    def pop(self, name: str) -> Tensor | None:
        """The tensor of that name, if it is there."""
        return self._weights.pop(name, None)

    def add_one_to_norms(self) -> None:
        """Turns RMS norms that multiply by 1 + weight into ours."""
        for name in self._weights:
            if name.endswith("norm.weight"):
                self._weights[name] = self._weights[name] + 1

    def embedding(self) -> Embedding:
        return self.kernels.embedding(self.take(EMBEDDINGS))

    def output_heads(self, norms: Sequence[Tensor | None]) -> list[OutputHead]:
        return self.kernels.output_heads(self.take(HEAD), norms, self._spec.config.rms_eps)

    def layers(self, module: int) -> Layers:
        config = self._spec.config
        return self.kernels.layers(config, self._weights, [f"{module}.layers.{i}" for i in range(config.layers)])


class FeatureDrafter(Drafter):
    """See the module.

    Args:
        head: loaded.
        tokenizer: folder of its tokenizer.json.
        info: what an orchestrator is told; names the features.
        spec: of the head.
        dtype: of its caches.
        device: where they lie.
        pages: of each.
        page_size: slots per page.
        tree_width: most nodes run per level of a tree; 0: chains only.
        shape: of all trees; None: they grow to the likeliest nodes, and sampled ones have a shape of ours.
        grammar_limits: what grammars may take.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED)

    def __init__(
        self,
        head: Head,
        tokenizer: Path,
        info: ModelInfo,
        spec: HeadSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pages: int,
        page_size: int = 16,
        tree_width: int = 0,
        shape: Shape | None = None,
        grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        self.tree_width = tree_width if shape is None or not tree_width else shape.width
        self._shape, self._info = shape, info
        self._grammars = Grammars(tokenizer, waits=False, limits=grammar_limits)
        self._modules = _Modules(head, spec, dtype=dtype, device=device, pages=pages, page_size=page_size)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> Proposals:
        assert step.features is not None
        modules = self._modules
        with cores.working():
            modules.copy_slots(step.rows.slot_copies)
            batch = build_batch(step.rows, modules.page_size, modules.device)
            states = to_tensor(step.features).to(modules.device)
            outs = modules.run(batch, states, lambda: _slots_before(step.rows, modules.page_size), is_own=False)
            modules.write_tokens(batch)
            columns, tokens = modules.head.token_ids, modules.token_ids
            shaper = shaper_of_drafts(step, tokens, self._grammars, ahead=_Run.ahead, columns=columns)
            return draft(step, _Run(modules, 0, outs), width=self.tree_width, shape=self._shape, shaper=shaper)

    def scrub(self, page_ids: Ints) -> None:
        self._modules.scrub(page_ids)


class _Modules:
    """The modules of a head with their caches."""

    def __init__(
        self, head: Head, spec: HeadSpec, *, dtype: torch.dtype, device: torch.device, pages: int, page_size: int
    ) -> None:
        self.head, self.page_size, self.device, self.count = head, page_size, device, spec.modules
        # What the next module reads is kept beside K and V: it may be wanted in a later step.
        widths = [spec.config.hidden_size] * (spec.modules - 1) + [0]
        self._caches = [
            KVCache(spec.config, pages=pages, page_size=page_size, dtype=dtype, device=device, feature_width=width)
            for width in widths
        ]
        self._attention = head.layers[0].create_attention(page_size)  # all modules have the same sizes

    @property
    def token_ids(self) -> Tensor:
        """Token of every slot's pair, i32[pages, page_size]."""
        return self._caches[0].token_ids

    def write_tokens(self, batch: Batch) -> None:
        """Notes the tokens of committed pairs: what penalties and grammars go by."""
        self._caches[0].write_tokens(batch.slots, batch.token_ids)

    def scrub(self, page_ids: Ints) -> None:
        for cache in self._caches:
            cache.scrub(page_ids)

    def copy_slots(self, pairs: npt.NDArray[np.int32]) -> None:
        for cache in self._caches:
            cache.copy_slots(map(tuple, pairs.tolist()))

    def run(self, batch: Batch, states: Tensor, before: Callable[[], Longs], *, is_own: bool) -> list[Tensor]:
        """Runs tokens through all modules.

        Args:
            batch: the tokens and where they go.
            states: for the first module, [tokens, width].
            before: gives the slot before each token's, i64[tokens]; asked for with several modules only.
            is_own: the states come from the head.

        Returns:
            Outputs of each module's layers.
        """
        head = self.head
        embeddings = head.embed(batch.token_ids)
        self._attention.plan(batch)
        slots_before = torch.from_numpy(before()).to(self.device) if self.count > 1 else None
        outs: list[Tensor] = []
        for module, (layers, cache) in enumerate(zip(head.layers, self._caches, strict=True)):
            if slots_before is not None and module:
                states, is_own = self._caches[module - 1].read_features(slots_before), True
            x, beside = head.inputs(module, embeddings, states, is_own=is_own)
            outs.append(layers.forward(x, batch, cache, self._attention, beside))
            if cache.features is not None:
                cache.write_features(batch.slots, head.state(module, outs[-1]).to(cache.features.dtype))
        return outs


class _Run:
    """See ``growth.TreeRun``.

    Args:
        modules: that ran.
        turn: of the module whose outputs predict.
        outs: outputs of each module.
    """

    ahead = 1

    def __init__(self, modules: _Modules, turn: int, outs: list[Tensor]) -> None:
        self._modules, self._turn, self._outs = modules, turn, outs
        self.token_ids = modules.head.token_ids

    def logits(self, tokens: Longs) -> Tensor:
        return self._modules.head.logits(self._turn, self._outputs(tokens))

    def distinct(self, tokens: Longs) -> tuple[Longs, Longs]:
        every = np.arange(len(tokens))
        return every, every

    def advance(self, rows: TokenRows, parents: Longs) -> _Run:
        modules = self._modules
        batch = build_batch(rows, modules.page_size, modules.device)
        return self._advance(batch, parents, lambda: _slots_before(rows, modules.page_size))

    def advance_trees(self, rows: TreeRows, parents: Longs) -> _Run:
        modules = self._modules
        batch = build_tree_batch(rows, modules.page_size, modules.device)
        return self._advance(batch, parents, lambda: _slots_of_parents(rows, modules.page_size))

    def _advance(self, batch: Batch, parents: Longs, before: Callable[[], Longs]) -> _Run:
        modules = self._modules
        states = modules.head.state(self._turn, self._outputs(parents))
        turn = (self._turn + 1) % modules.count
        return _Run(modules, turn, modules.run(batch, states, before, is_own=True))

    def _outputs(self, tokens: Longs) -> Tensor:
        return self._outs[self._turn].index_select(0, torch.from_numpy(tokens).to(self._modules.device))


def _slots_before(rows: TokenRows, page_size: int) -> Longs:
    """The slot before that of each token; before slot 0 of a row, that one. i64[tokens]."""
    places = np.repeat(rows.starts.astype(np.int64), rows.lengths) + within(rows.lengths)
    return slots_at(rows, np.repeat(np.arange(len(rows.lengths)), rows.lengths), np.maximum(places - 1, 0), page_size)


def _slots_of_parents(rows: TreeRows, page_size: int) -> Longs:
    """The slot of each node's parent; of a node without ancestors the last committed one. i64[nodes]."""
    of_rows = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    ends, places = np.cumsum(rows.ancestor_counts), np.full(len(of_rows), -1, np.int64)
    has_parent = np.flatnonzero(rows.ancestor_counts)
    places[has_parent] = rows.ancestors[ends[has_parent] - 1]
    return slots_at(rows, of_rows, rows.bases.astype(np.int64)[of_rows] + places, page_size)


def to_tensor(features: npt.NDArray[Any]) -> Tensor:
    """Features as they come off the wire; bfloat16 travels as its bits."""
    tensor = torch.from_numpy(np.array(features))  # a copy, because what came off the wire is read-only
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
