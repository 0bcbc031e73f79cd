"""Messages with every field at and beyond its limits, for tests that send them all.

The fields are those of the protobuf descriptors: one that is added is tried too, and a kind of field or an array that
this file does not know fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pilotfish.rpc import codec

INTEGERS = (0, -1, 2**31 - 1, 2**31, 2**32, 10**12, 2**62, 2**63 - 1, 2**63)
FLOATS = (1e-45, float("nan"), float("inf"), -float("inf"), 3.4e38)
MILLION = 1_000_000

ARRAYS = {
    "TokenRows": codec._ROWS | {"slot_copies": "<i4"},
    "SamplingRows": codec._SAMPLING,
    "ShapingRows": codec._SHAPING,
    "Supports": codec._SUPPORTS,
    "TargetStep": codec._TARGET_STEP,
    "WantedLogprobs": codec._WANTED_LOGPROBS,
    "DraftStep": codec._DRAFT_STEP,
    "Tensor": {"data": "u1"},
    "ReadFeaturesRequest": {"slots": "<i4"},
}
"""Element types of the arrays that travel as bytes, by message."""

_WHOLE = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_BROKEN = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)

Path = tuple[str, ...]
Change = Callable[[Any, str], None]
"""Changes a field of a message, by its name."""


def cases(*examples: Message) -> Iterator[tuple[str, Any]]:
    """What was changed, and the message: each of the examples with each of its fields changed in turn.

    Together they have every message that there may be in one of them.
    """
    tried = set()
    for example in examples:
        for path, field in _fields(example):
            tried.add(path)
            for what, change in _changes(field):
                copy: Any = type(example)()
                copy.CopyFrom(example)
                parent = copy
                for name in path[:-1]:
                    parent = getattr(parent, name)
                    parent = parent if isinstance(parent, Message) else parent[0]
                try:
                    change(parent, path[-1])
                except ValueError:
                    continue  # protobuf itself knows that it does not fit
                yield f"{'.'.join(path)} {what}", copy
    missing = set(_paths(examples[0].DESCRIPTOR)) - tried
    assert not missing, f"no example has {missing}"


def _paths(message: Descriptor, path: Path = ()) -> Iterator[Path]:
    for field in message.fields:
        yield (*path, field.name)
        if _has_fields(field):
            yield from _paths(field.message_type, (*path, field.name))


def _fields(message: Message, path: Path = ()) -> Iterator[tuple[Path, FieldDescriptor]]:
    for field in message.DESCRIPTOR.fields:
        yield (*path, field.name), field
        if _has_fields(field):
            inner = getattr(message, field.name)
            parts: Sequence[Message] = inner[:1] if field.is_repeated else [inner] * message.HasField(field.name)
            for part in parts:
                yield from _fields(part, (*path, field.name))


def _has_fields(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _changes(field: FieldDescriptor) -> Iterator[tuple[str, Change]]:
    if _has_fields(field):
        yield "cleared", lambda parent, name: parent.ClearField(name)
        if field.is_repeated:
            yield "repeated often", lambda parent, name: getattr(parent, name).extend(getattr(parent, name)[:1] * 9999)
    elif field.message_type is not None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        yield from ((f"with key {each}", _update({each: 1})) for each in _values(key))
        yield from ((f"with value {each}", _update({5: each})) for each in _values(value))
        yield "of many", _update(dict.fromkeys(range(100_000), 1))
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield from _array_changes(np.dtype(ARRAYS[field.containing_type.name][field.name]))
    elif field.is_repeated:
        yield from ((f"with {each}", _extend([each])) for each in _values(field))
        yield "of a million", _extend(["x" if field.type == FieldDescriptor.TYPE_STRING else 0] * MILLION)
    else:
        yield from ((f"of {str(each)[:20]}", _assign(each)) for each in _values(field))


def _values(field: FieldDescriptor) -> Sequence[Any]:
    if field.cpp_type in _WHOLE or field.type == FieldDescriptor.TYPE_ENUM:
        return INTEGERS
    if field.cpp_type in _BROKEN:
        return (*FLOATS, *INTEGERS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return (True, False)
    assert field.type == FieldDescriptor.TYPE_STRING, f"{field.full_name} is of a kind that is not known here"
    return ("", "x" * MILLION)


def _array_changes(dtype: np.dtype[Any]) -> Iterator[tuple[str, Change]]:
    yield "of an odd size", lambda parent, name: setattr(parent, name, getattr(parent, name) + b"x")
    yield "empty", _assign(b"")
    yield "of a million", _assign(bytes(MILLION * dtype.itemsize))
    for value in FLOATS if dtype.kind == "f" else INTEGERS:
        if dtype.kind == "f" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            yield f"with {value}", _set_first(dtype, value)


def _assign(value: Any) -> Change:
    return lambda parent, name: setattr(parent, name, value)


def _extend(values: Sequence[Any]) -> Change:
    return lambda parent, name: getattr(parent, name).extend(values)


def _update(values: dict[int, Any]) -> Change:
    return lambda parent, name: getattr(parent, name).update(values)


def _set_first(dtype: np.dtype[Any], value: float) -> Change:
    def change(parent: Any, name: str) -> None:
        array = np.frombuffer(getattr(parent, name), dtype).copy()
        array = array if len(array) else np.zeros(1, dtype)
        array[0] = value
        setattr(parent, name, array.tobytes())

    return change
