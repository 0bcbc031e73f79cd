"""Arrays and steps to messages and back.

``to_pb`` and ``from_pb`` functions come in pairs, one pair per message. Reading an array checks its
byte length and gives a read-only view of the message, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import (
    DraftResult,
    DraftStep,
    Grant,
    ProposalKind,
    SamplingRows,
    Supports,
    TargetResult,
    TargetStep,
    TokenRows,
)
from pilotfish.v1 import draft_pb2, target_pb2, types_pb2

# bfloat16 has no numpy type; its bits travel as uint16 and torch views them.
_DTYPES: dict[Any, np.dtype[Any]] = {
    types_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DTYPE_FLOAT16: np.dtype("<f2"),
    types_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
}


def pack(array: npt.NDArray[Any], dtype: str) -> bytes:
    """The elements in little-endian row-major order; ``dtype`` such as ``"<i4"``."""
    return np.ascontiguousarray(array, dtype).tobytes()


def unpack(data: bytes, dtype: str, field: str) -> npt.NDArray[Any]:
    """The elements of ``data``, one axis.

    Raises:
        InvalidArgumentError: if the byte count is no multiple of the element size.
    """
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidArgumentError(f"{field} has {len(data)} bytes; must be a multiple of {size}")
    return np.frombuffer(data, dtype)


def tensor_to_pb(array: npt.NDArray[Any]) -> types_pb2.Tensor:
    """A float32, float16 or (as uint16 bits) bfloat16 array as a message."""
    dtype = next(code for code, known in _DTYPES.items() if known == array.dtype)
    return types_pb2.Tensor(dtype=dtype, shape=array.shape, data=np.ascontiguousarray(array).tobytes())


def tensor_from_pb(tensor: types_pb2.Tensor, field: str) -> npt.NDArray[Any]:
    """Inverse of ``tensor_to_pb``; bfloat16 comes as uint16 bits.

    Raises:
        InvalidArgumentError: on an unknown element type, or a shape that does not fit the bytes.
    """
    if tensor.dtype not in _DTYPES:
        raise InvalidArgumentError(f"{field}.dtype is {tensor.dtype}; known are {sorted(_DTYPES)}")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if min(shape, default=0) < 0 or expected != len(tensor.data):
        raise InvalidArgumentError(f"{field}.shape is {shape}, which needs {expected} bytes, not {len(tensor.data)}")
    return np.frombuffer(tensor.data, dtype).reshape(shape)


def rows_to_pb(rows: TokenRows) -> types_pb2.TokenRows:
    return types_pb2.TokenRows(
        token_ids=pack(rows.token_ids, "<i4"),
        lengths=pack(rows.lengths, "<i4"),
        starts=pack(rows.starts, "<i4"),
        page_counts=pack(rows.page_counts, "<i4"),
        page_ids=pack(rows.page_ids, "<i4"),
        parents=pack(rows.parents, "<i4"),
        slot_copies=pack(rows.slot_copies, "<i4"),
    )


def rows_from_pb(rows: types_pb2.TokenRows) -> TokenRows:
    copies = unpack(rows.slot_copies, "<i4", "rows.slot_copies")
    if len(copies) % 2:
        raise InvalidArgumentError(f"rows.slot_copies has {len(copies)} values; must be pairs (from, to)")
    return TokenRows(
        token_ids=unpack(rows.token_ids, "<i4", "rows.token_ids"),
        lengths=unpack(rows.lengths, "<i4", "rows.lengths"),
        starts=unpack(rows.starts, "<i4", "rows.starts"),
        page_counts=unpack(rows.page_counts, "<i4", "rows.page_counts"),
        page_ids=unpack(rows.page_ids, "<i4", "rows.page_ids"),
        parents=unpack(rows.parents, "<i4", "rows.parents"),
        slot_copies=copies.reshape(-1, 2),
    )


def sampling_to_pb(sampling: SamplingRows) -> types_pb2.SamplingRows:
    return types_pb2.SamplingRows(
        temperatures=pack(sampling.temperatures, "<f4"),
        top_ks=pack(sampling.top_ks, "<i4"),
        top_ps=pack(sampling.top_ps, "<f4"),
        min_ps=pack(sampling.min_ps, "<f4"),
        seeds=pack(sampling.seeds, "<u8"),
        rounds=pack(sampling.rounds, "<i8"),
    )


def sampling_from_pb(sampling: types_pb2.SamplingRows) -> SamplingRows:
    return SamplingRows(
        temperatures=unpack(sampling.temperatures, "<f4", "sampling.temperatures"),
        top_ks=unpack(sampling.top_ks, "<i4", "sampling.top_ks"),
        top_ps=unpack(sampling.top_ps, "<f4", "sampling.top_ps"),
        min_ps=unpack(sampling.min_ps, "<f4", "sampling.min_ps"),
        seeds=unpack(sampling.seeds, "<u8", "sampling.seeds"),
        rounds=unpack(sampling.rounds, "<i8", "sampling.rounds"),
    )


def supports_to_pb(supports: Supports) -> types_pb2.Supports:
    return types_pb2.Supports(counts=pack(supports.counts, "<i4"), token_ids=pack(supports.token_ids, "<i4"))


def supports_from_pb(supports: types_pb2.Supports) -> Supports:
    return Supports(
        counts=unpack(supports.counts, "<i4", "supports.counts"),
        token_ids=unpack(supports.token_ids, "<i4", "supports.token_ids"),
    )


def grant_to_pb(grant: Grant) -> types_pb2.StreamOpened:
    return types_pb2.StreamOpened(
        model_id=grant.model_id,
        weights_hash=grant.weights_hash,
        tokenizer_hash=grant.tokenizer_hash,
        vocab_size=grant.vocab_size,
        page_size=grant.page_size,
        first_page=grant.first_page,
        page_count=grant.page_count,
        max_len=grant.max_len,
        max_step_tokens=grant.max_step_tokens,
        incarnation=grant.incarnation,
        features=grant.features,
        feature_width=grant.feature_width,
    )


def grant_from_pb(opened: types_pb2.StreamOpened) -> Grant:
    return Grant(
        model_id=opened.model_id,
        weights_hash=opened.weights_hash,
        tokenizer_hash=opened.tokenizer_hash,
        vocab_size=opened.vocab_size,
        page_size=opened.page_size,
        first_page=opened.first_page,
        page_count=opened.page_count,
        max_len=opened.max_len,
        max_step_tokens=opened.max_step_tokens,
        incarnation=opened.incarnation,
        features=tuple(opened.features),
        feature_width=opened.feature_width,
    )


def target_step_to_pb(step: TargetStep) -> target_pb2.TargetStep:
    return target_pb2.TargetStep(
        step_id=step.step_id,
        rows=rows_to_pb(step.rows),
        sampling=sampling_to_pb(step.sampling),
        output_nodes=pack(step.output_nodes, "<i4"),
        supports=supports_to_pb(step.supports) if len(step.supports.counts) else None,
        draw_rules=pack(step.draw_rules, "u1"),
        feature_nodes=pack(step.feature_nodes, "<i4"),
    )


def target_step_from_pb(step: target_pb2.TargetStep) -> TargetStep:
    return TargetStep(
        step_id=step.step_id,
        rows=rows_from_pb(step.rows),
        sampling=sampling_from_pb(step.sampling),
        output_nodes=unpack(step.output_nodes, "<i4", "output_nodes"),
        supports=supports_from_pb(step.supports),
        draw_rules=unpack(step.draw_rules, "u1", "draw_rules"),
        feature_nodes=unpack(step.feature_nodes, "<i4", "feature_nodes"),
    )


def target_result_to_pb(result: TargetResult) -> target_pb2.TargetResult:
    return target_pb2.TargetResult(
        step_id=result.step_id,
        token_ids=pack(result.token_ids, "<i4"),
        tail_masses=pack(result.tail_masses, "<f4"),
        support_probs=pack(result.support_probs, "<f4"),
        features=None if result.features is None else tensor_to_pb(result.features),
        compute_us=result.compute_us,
    )


def target_result_from_pb(result: target_pb2.TargetResult) -> TargetResult:
    return TargetResult(
        step_id=result.step_id,
        token_ids=unpack(result.token_ids, "<i4", "token_ids"),
        tail_masses=unpack(result.tail_masses, "<f4", "tail_masses"),
        support_probs=unpack(result.support_probs, "<f4", "support_probs"),
        features=tensor_from_pb(result.features, "features") if result.HasField("features") else None,
        compute_us=result.compute_us,
    )


def draft_opened_to_pb(grant: Grant, kinds: Sequence[ProposalKind]) -> draft_pb2.DraftOpened:
    return draft_pb2.DraftOpened(worker=grant_to_pb(grant), proposal_kinds=[int(kind) for kind in kinds])  # type: ignore[misc]


def draft_opened_from_pb(opened: draft_pb2.DraftOpened) -> tuple[Grant, tuple[ProposalKind, ...]]:
    return grant_from_pb(opened.worker), tuple(ProposalKind(kind) for kind in opened.proposal_kinds)


def draft_step_to_pb(step: DraftStep) -> draft_pb2.DraftStep:
    return draft_pb2.DraftStep(
        step_id=step.step_id,
        rows=rows_to_pb(step.rows),
        features=None if step.features is None else tensor_to_pb(step.features),
        sampling=sampling_to_pb(step.sampling),
        draft_lengths=pack(step.draft_lengths, "<i4"),
        node_limits=pack(step.node_limits, "<i4"),
        proposal_kinds=pack(step.proposal_kinds, "u1"),
        support_limit=step.support_limit,
    )


def draft_step_from_pb(step: draft_pb2.DraftStep) -> DraftStep:
    return DraftStep(
        step_id=step.step_id,
        rows=rows_from_pb(step.rows),
        features=tensor_from_pb(step.features, "features") if step.HasField("features") else None,
        sampling=sampling_from_pb(step.sampling),
        draft_lengths=unpack(step.draft_lengths, "<i4", "draft_lengths"),
        node_limits=unpack(step.node_limits, "<i4", "node_limits"),
        proposal_kinds=unpack(step.proposal_kinds, "u1", "proposal_kinds"),
        support_limit=step.support_limit,
    )


def draft_result_to_pb(result: DraftResult) -> draft_pb2.DraftResult:
    return draft_pb2.DraftResult(
        step_id=result.step_id,
        node_counts=pack(result.node_counts, "<i4"),
        token_ids=pack(result.token_ids, "<i4"),
        parents=pack(result.parents, "<i4"),
        supports=supports_to_pb(result.supports) if len(result.supports.counts) else None,
        support_probs=pack(result.support_probs, "<f4"),
        compute_us=result.compute_us,
    )


def draft_result_from_pb(result: draft_pb2.DraftResult) -> DraftResult:
    return DraftResult(
        step_id=result.step_id,
        node_counts=unpack(result.node_counts, "<i4", "node_counts"),
        token_ids=unpack(result.token_ids, "<i4", "token_ids"),
        parents=unpack(result.parents, "<i4", "parents"),
        supports=supports_from_pb(result.supports),
        support_probs=unpack(result.support_probs, "<f4", "support_probs"),
        compute_us=result.compute_us,
    )
