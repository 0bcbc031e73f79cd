"""A decoder with the pages it writes to: what both workers run steps on."""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish.runtime.batch import build_batch
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.loading import LoadedModel
from pilotfish.runtime.models.decoder import Decoder, Hidden
from pilotfish.steps import TokenRows


class PagedModel:
    """Runs token rows through a model and its cache.

    Args:
        model: loaded.
        pages: pages of the cache.
        page_size: slots per page.
        features: states stored beside every slot, by the names of types.proto.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        pages: int,
        page_size: int = 16,
        features: tuple[str, ...] = (),
    ) -> None:
        self.decoder: Decoder = model.decoder
        self.features = features
        self.feature_width = self.decoder.feature_width(features)
        self.cache = KVCache(
            model.config,
            pages=pages,
            page_size=page_size,
            dtype=self.decoder.dtype,
            device=self.decoder.device,
            feature_width=self.feature_width,
        )
        self._attention = self.decoder.create_attention(page_size)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def extend(self, rows: TokenRows) -> Hidden:
        """Does the slot copies, then runs the new tokens and caches them; ``rows`` are validated."""
        batch = build_batch(rows, self.cache.page_size, self.device)
        self.cache.copy_slots(map(tuple, rows.slot_copies.tolist()))
        self._attention.plan(batch)
        hidden = self.decoder.forward(batch, self.cache, self._attention, self.features)
        self.cache.write_tokens(batch.slots, batch.token_ids)
        if hidden.features is not None:
            self.cache.write_features(batch.slots, hidden.features)
        return hidden

    def logits(self, hidden: Hidden, tokens: Tensor) -> Tensor:
        """Logits f32[n, vocab] of the tokens i64[n] of the step."""
        return self.decoder.logits(hidden.last.index_select(0, tokens))
