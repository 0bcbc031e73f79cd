"""Arrays and steps to messages and back.

``to_pb`` and ``from_pb`` functions come in pairs, one pair per message. Reading an array checks its
byte length and gives a read-only view of the message, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.steps import (
    MAX_GRAMMAR_ENDS,
    MAX_WRITTEN_BYTES,
    Capabilities,
    DraftResult,
    DraftStep,
    Grammar,
    GrammarKind,
    Grant,
    Logprobs,
    ProposalKind,
    SamplingRows,
    ShapingRows,
    Supports,
    TargetResult,
    TargetStep,
    TokenRows,
    WantedLogprobs,
    require,
    require_range,
)
from pilotfish.v1 import draft_pb2, target_pb2, types_pb2

# bfloat16 has no numpy type; its bits travel as uint16 and torch views them.
_DTYPES: dict[Any, np.dtype[Any]] = {
    types_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DTYPE_FLOAT16: np.dtype("<f2"),
    types_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_MOST_AXES = 8


def pack(array: npt.NDArray[Any], dtype: str) -> bytes:
    """The elements in little-endian row-major order; ``dtype`` such as ``"<i4"``."""
    return np.ascontiguousarray(array, dtype).tobytes()


def unpack(data: bytes, dtype: str, field: str) -> npt.NDArray[Any]:
    """The elements of ``data``, one axis.

    Raises:
        InvalidArgumentError: if the byte count is no multiple of the element size.
    """
    size = np.dtype(dtype).itemsize
    require(len(data) % size == 0, field, f"{len(data)} bytes", f"must be a multiple of {size}")
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
    require(tensor.dtype in _DTYPES, f"{field}.dtype", tensor.dtype, f"known are {sorted(_DTYPES)}")
    axes = len(tensor.shape)
    require(axes <= _MOST_AXES, f"{field}.shape", f"of {axes} axes", f"at most {_MOST_AXES} may be")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    expected = prod(shape) * dtype.itemsize  # of Python's integers, which do not overflow
    fits = min(shape, default=0) >= 0 and expected == len(tensor.data)
    require(fits, f"{field}.shape", shape, f"which needs {expected} bytes, not {len(tensor.data)}")
    return np.frombuffer(tensor.data, dtype).reshape(shape)


# Arrays of each message and their element types; the names are those of the steps' own fields.
_ROWS = dict.fromkeys(("token_ids", "lengths", "starts", "page_counts", "page_ids", "parents"), "<i4")
_SAMPLING = {
    "temperatures": "<f4",
    "top_ks": "<i4",
    "top_ps": "<f4",
    "min_ps": "<f4",
    "seeds": "<u8",
    "rounds": "<i8",
}
_SHAPING = {
    "rows": "<i4",
    "prompt_lengths": "<i4",
    "repetition_penalties": "<f4",
    "presence_penalties": "<f4",
    "frequency_penalties": "<f4",
    "bias_counts": "<i4",
    "bias_token_ids": "<i4",
    "bias_values": "<f4",
    "allowed_counts": "<i4",
    "allowed_token_ids": "<i4",
    "min_tokens": "<i4",
    "end_counts": "<i4",
    "end_token_ids": "<i4",
    "grammar_indices": "<i4",
}
_SUPPORTS = {"counts": "<i4", "token_ids": "<i4"}
_TARGET_STEP = {"output_nodes": "<i4", "draw_rules": "u1", "feature_rules": "u1"}
_WANTED_LOGPROBS = dict.fromkeys(("counts", "scored_nodes", "scored_token_ids", "scored_counts"), "<i4")
_LOGPROBS = {"tokens": "<f4", "supports": "<f4", "top_token_ids": "<i4", "top": "<f4"}
_TARGET_RESULT = {"token_ids": "<i4", "tail_masses": "<f4", "support_probs": "<f4"}
_DRAFT_STEP = {"draft_lengths": "<i4", "node_limits": "<i4", "proposal_kinds": "u1"}
_DRAFT_RESULT = {"node_counts": "<i4", "token_ids": "<i4", "parents": "<i4", "support_probs": "<f4"}
_GRANT = tuple(field.name for field in fields(Grant) if field.name != "features")


def _packed(source: Any, layout: Mapping[str, str]) -> dict[str, Any]:
    return {name: pack(getattr(source, name), dtype) for name, dtype in layout.items()}


def _unpacked(message: Any, layout: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    return {name: unpack(getattr(message, name), dtype, prefix + name) for name, dtype in layout.items()}


def rows_to_pb(rows: TokenRows) -> types_pb2.TokenRows:
    return types_pb2.TokenRows(**_packed(rows, _ROWS), slot_copies=pack(rows.slot_copies, "<i4"))


def rows_from_pb(rows: types_pb2.TokenRows) -> TokenRows:
    copies = unpack(rows.slot_copies, "<i4", "rows.slot_copies")
    require(len(copies) % 2 == 0, "rows.slot_copies", f"{len(copies)} values", "must be pairs (from, to)")
    return TokenRows(**_unpacked(rows, _ROWS, "rows."), slot_copies=copies.reshape(-1, 2))


def sampling_to_pb(sampling: SamplingRows) -> types_pb2.SamplingRows:
    return types_pb2.SamplingRows(**_packed(sampling, _SAMPLING), shaping=shaping_to_pb(sampling.shaping))


def sampling_from_pb(sampling: types_pb2.SamplingRows) -> SamplingRows:
    shaping = shaping_from_pb(sampling.shaping) if sampling.HasField("shaping") else None
    return SamplingRows(**_unpacked(sampling, _SAMPLING, "sampling."), shaping=shaping)


def shaping_to_pb(shaping: ShapingRows | None) -> types_pb2.ShapingRows | None:
    """None where no row asks: an absent message."""
    if shaping is None:
        return None
    return types_pb2.ShapingRows(**_packed(shaping, _SHAPING), grammars=map(grammar_to_pb, shaping.grammars))


def shaping_from_pb(shaping: types_pb2.ShapingRows) -> ShapingRows:
    arrays, count = _unpacked(shaping, _SHAPING, "sampling.shaping."), len(shaping.grammars)
    rows = len(arrays["rows"])
    require(count <= rows, "sampling.shaping.grammars", f"{count} grammars", f"at most one for each of {rows} rows")
    return ShapingRows(**arrays, grammars=tuple(map(grammar_from_pb, shaping.grammars)))


def grammar_to_pb(grammar: Grammar) -> types_pb2.Grammar:
    kind = f"GRAMMAR_KIND_{grammar.kind.name}"
    return types_pb2.Grammar(kind=kind, text=grammar.text, end_token_ids=grammar.end_token_ids)


def grammar_from_pb(grammar: types_pb2.Grammar) -> Grammar:
    """Raises ``InvalidArgumentError`` on an unknown kind, a text that is too long, or without an end token."""
    known = [int(kind) for kind in GrammarKind]
    require(grammar.kind in known, "grammar.kind", grammar.kind, f"must be one of {known}")
    size, ends = len(grammar.text.encode()), len(grammar.end_token_ids)
    require(size <= MAX_WRITTEN_BYTES, "grammar.text", f"{size} bytes", f"at most {MAX_WRITTEN_BYTES} are allowed")
    require(ends > 0, "grammar.end_token_ids", "empty", "a grammar needs a token to end with")
    require(ends <= MAX_GRAMMAR_ENDS, "grammar.end_token_ids", f"{ends} ids", f"at most {MAX_GRAMMAR_ENDS} may be")
    require_range(np.array(grammar.end_token_ids), "grammar.end_token_ids", 0, 2**31 - 1, "must be >= 0")
    return Grammar(GrammarKind(grammar.kind), grammar.text, tuple(grammar.end_token_ids))


def supports_to_pb(supports: Supports) -> types_pb2.Supports | None:
    """None where there are none: an absent message."""
    return types_pb2.Supports(**_packed(supports, _SUPPORTS)) if len(supports.counts) else None


def supports_from_pb(supports: types_pb2.Supports) -> Supports:
    return Supports(**_unpacked(supports, _SUPPORTS, "supports."))


def wanted_logprobs_to_pb(wanted: WantedLogprobs | None) -> target_pb2.WantedLogprobs | None:
    return None if wanted is None else target_pb2.WantedLogprobs(**_packed(wanted, _WANTED_LOGPROBS))


def wanted_logprobs_from_pb(step: target_pb2.TargetStep) -> WantedLogprobs | None:
    if not step.HasField("logprobs"):
        return None
    return WantedLogprobs(**_unpacked(step.logprobs, _WANTED_LOGPROBS, "logprobs."))


def logprobs_to_pb(logprobs: Logprobs | None) -> target_pb2.Logprobs | None:
    return None if logprobs is None else target_pb2.Logprobs(**_packed(logprobs, _LOGPROBS))


def logprobs_from_pb(result: target_pb2.TargetResult) -> Logprobs | None:
    if not result.HasField("logprobs"):
        return None
    return Logprobs(**_unpacked(result.logprobs, _LOGPROBS, "logprobs."))


def grant_to_pb(grant: Grant) -> types_pb2.StreamOpened:
    return types_pb2.StreamOpened(**{name: getattr(grant, name) for name in _GRANT}, features=grant.features)


def grant_from_pb(opened: types_pb2.StreamOpened) -> Grant:
    return Grant(**{name: getattr(opened, name) for name in _GRANT}, features=tuple(opened.features))


def draft_opened_to_pb(grant: Grant, capabilities: Capabilities) -> draft_pb2.DraftOpened:
    return draft_pb2.DraftOpened(
        worker=grant_to_pb(grant),
        proposal_kinds=[f"PROPOSAL_KIND_{kind.name}" for kind in capabilities.kinds],
        tree_width=capabilities.tree_width,
        scheme=capabilities.scheme,
    )


def draft_opened_from_pb(opened: draft_pb2.DraftOpened) -> tuple[Grant, Capabilities]:
    kinds = tuple(ProposalKind(kind) for kind in opened.proposal_kinds)
    return grant_from_pb(opened.worker), Capabilities(kinds, opened.tree_width, opened.scheme)


def target_step_to_pb(step: TargetStep) -> target_pb2.TargetStep:
    return target_pb2.TargetStep(
        step_id=step.step_id,
        rows=rows_to_pb(step.rows),
        sampling=sampling_to_pb(step.sampling),
        supports=supports_to_pb(step.supports),
        logprobs=wanted_logprobs_to_pb(step.logprobs),
        **_packed(step, _TARGET_STEP),
    )


def target_step_from_pb(step: target_pb2.TargetStep) -> TargetStep:
    return TargetStep(
        step_id=step.step_id,
        rows=rows_from_pb(step.rows),
        sampling=sampling_from_pb(step.sampling),
        supports=supports_from_pb(step.supports),
        logprobs=wanted_logprobs_from_pb(step),
        **_unpacked(step, _TARGET_STEP),
    )


def target_result_to_pb(result: TargetResult) -> target_pb2.TargetResult:
    return target_pb2.TargetResult(
        step_id=result.step_id,
        features=_optional_tensor_to_pb(result.features),
        compute_us=result.compute_us,
        logprobs=logprobs_to_pb(result.logprobs),
        **_packed(result, _TARGET_RESULT),
    )


def target_result_from_pb(result: target_pb2.TargetResult) -> TargetResult:
    return TargetResult(
        step_id=result.step_id,
        features=_optional_tensor_from_pb(result),
        compute_us=result.compute_us,
        logprobs=logprobs_from_pb(result),
        **_unpacked(result, _TARGET_RESULT),
    )


def draft_step_to_pb(step: DraftStep) -> draft_pb2.DraftStep:
    return draft_pb2.DraftStep(
        step_id=step.step_id,
        rows=rows_to_pb(step.rows),
        features=_optional_tensor_to_pb(step.features),
        sampling=sampling_to_pb(step.sampling),
        support_limit=step.support_limit,
        **_packed(step, _DRAFT_STEP),
    )


def draft_step_from_pb(step: draft_pb2.DraftStep) -> DraftStep:
    return DraftStep(
        step_id=step.step_id,
        rows=rows_from_pb(step.rows),
        features=_optional_tensor_from_pb(step),
        sampling=sampling_from_pb(step.sampling),
        support_limit=step.support_limit,
        **_unpacked(step, _DRAFT_STEP),
    )


def draft_result_to_pb(result: DraftResult) -> draft_pb2.DraftResult:
    return draft_pb2.DraftResult(
        step_id=result.step_id,
        supports=supports_to_pb(result.supports),
        compute_us=result.compute_us,
        **_packed(result, _DRAFT_RESULT),
    )


def draft_result_from_pb(result: draft_pb2.DraftResult) -> DraftResult:
    return DraftResult(
        step_id=result.step_id,
        supports=supports_from_pb(result.supports),
        compute_us=result.compute_us,
        **_unpacked(result, _DRAFT_RESULT),
    )


def _optional_tensor_to_pb(features: npt.NDArray[Any] | None) -> types_pb2.Tensor | None:
    return None if features is None else tensor_to_pb(features)


def _optional_tensor_from_pb(message: Any) -> npt.NDArray[Any] | None:
    return tensor_from_pb(message.features, "features") if message.HasField("features") else None
