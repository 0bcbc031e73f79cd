"""The paged KV cache: K and V of every layer, and beside them each slot's token id and feature.

A slot is named by one number, ``page_id * page_size + offset``. The cache knows nothing about
requests: rows are page tables that come with every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import FailedPreconditionError
from pilotfish.runtime.config import ModelConfig
from pilotfish.steps import Ints


class KVCache:
    """Memory of one worker.

    Args:
        config: sizes of the model.
        pages: pages in all.
        page_size: slots per page.
        dtype: of K, V and features.
        device: where everything lies.
        feature_width: values stored per slot beside K and V; 0 for none.

    Raises:
        FailedPreconditionError: the device has not so much memory.

    Attributes:
        layers: K and V, one ``[pages, 2, page_size, kv_heads, head_dim]`` per layer (FlashInfer's NHD).
        token_ids: i32[pages, page_size].
        features: ``[pages, page_size, feature_width]``, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_width: int = 0,
    ) -> None:
        shape = (config.layers, pages, 2, page_size, config.kv_heads, config.head_dim)
        self.features: Tensor | None = None
        try:
            # Zeros, because attention multiplies masked slots by 0, and 0 times a stray NaN is NaN.
            self._kv = torch.zeros(shape, dtype=dtype, device=device)
            self.token_ids = torch.zeros(pages, page_size, dtype=torch.int32, device=device)
            if feature_width:
                self.features = torch.zeros(pages, page_size, feature_width, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's of a GPU without memory is one, too
            raise FailedPreconditionError(
                f"pages is {pages:,}, and {device} has no longer the memory for so many: {str(error).splitlines()[0]}"
            ) from error
        self.layers = self._kv.unbind(0)
        self._rows = [layer.view(pages * 2 * page_size, -1) for layer in self.layers]
        self.page_size = page_size
        self.device = device

    def write(self, layer: int, slots: KVSlots, k: Tensor, v: Tensor) -> None:
        """Stores K and V of the step's tokens, each ``[tokens, kv_heads, head_dim]``."""
        rows = self._rows[layer]
        rows.index_copy_(0, slots.k_rows, k.reshape(len(k), -1))
        rows.index_copy_(0, slots.v_rows, v.reshape(len(v), -1))

    def write_tokens(self, slots: KVSlots, token_ids: Tensor) -> None:
        """Stores the token ids beside K and V; ``token_ids`` integers [tokens]."""
        self.token_ids.view(-1).index_copy_(0, slots.slots, token_ids.to(torch.int32))

    def write_features(self, slots: KVSlots, features: Tensor) -> None:
        """Stores features ``[tokens, feature_width]``."""
        assert self.features is not None
        self.features.view(-1, self.features.shape[-1]).index_copy_(0, slots.slots, features)

    def read_features(self, slots: Tensor) -> Tensor:
        """Features ``[n, feature_width]`` of the slots i64[n], in that order."""
        assert self.features is not None
        return self.features.view(-1, self.features.shape[-1]).index_select(0, slots)

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies slots as if one pair (from, to) after the other: K, V, token id and feature together."""
        origin: dict[int, int] = {}
        for source, target in pairs:
            origin[target] = origin.get(source, source)
        if not origin:
            return
        targets = KVSlots(torch.tensor(list(origin), device=self.device), self.page_size)
        sources = KVSlots(torch.tensor(list(origin.values()), device=self.device), self.page_size)
        # index_select reads everything before index_copy_ writes, so overlapping pairs are safe.
        k, v = self._kv_rows(sources.k_rows), self._kv_rows(sources.v_rows)
        layers = self._kv.view(len(self.layers), -1, k.shape[-1])
        layers.index_copy_(1, targets.k_rows, k)
        layers.index_copy_(1, targets.v_rows, v)
        self.write_tokens(targets, self.token_ids.view(-1).index_select(0, sources.slots))
        if self.features is not None:
            self.write_features(targets, self.read_features(sources.slots))

    def scrub(self, page_ids: Ints) -> None:
        """Sets what is not finite to 0 in these pages, after a model answered NaN.

        Their next owner masks the slots that it has not written, and a NaN there would reach it all the same.
        """
        pages = torch.from_numpy(np.unique(page_ids).astype(np.int64)).to(self.device)
        stores = self.layers if self.features is None else (*self.layers, self.features)
        for store in stores:
            found = store.index_select(0, pages)
            store.index_copy_(0, pages, found.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def _kv_rows(self, rows: Tensor) -> Tensor:
        kv = self._kv
        return kv.view(kv.shape[0], -1, kv.shape[-2] * kv.shape[-1]).index_select(1, rows)


class KVSlots:
    """Slots of a step's tokens, and where their K and V lie among a layer's rows. All i64[tokens]."""

    def __init__(self, slots: Tensor, page_size: int) -> None:
        self.slots = slots
        self._page_size = page_size

    @cached_property
    def k_rows(self) -> Tensor:
        return self.slots + self.slots.div(self._page_size, rounding_mode="floor") * self._page_size

    @cached_property
    def v_rows(self) -> Tensor:
        return self.k_rows + self._page_size
