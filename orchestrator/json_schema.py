"""Which JSON schemas a grammar keeps to: what it would not keep to is refused, by keyword and path.

xgrammar goes by one keyword of a schema and passes over what it does not know, so that a text could fit the grammar and
break the schema. Here every keyword of drafts 4 to 2020-12 has its rule, before anything is compiled. The table is
``KEYWORDS``; docs/structured_output.md shows it, and a test holds both against texts drawn from compiled grammars.
"""

from __future__ import annotations

import copy
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from orchestrator.schema_pattern import PatternError, all_but, written_out
from pilotfish.errors import InvalidArgumentError

MAX_DEPTH = 100
"""Objects and lists of a schema within each other."""

KEPT, PARTLY, REFUSED, SILENT = "kept to", "kept to, within limits", "refused", "says nothing"

_ONE = "only where a schema has no other keyword that asks for anything"
KEYWORDS: dict[str, tuple[str, str]] = {
    "$ref": (PARTLY, f"`#`, or `#/` and a path of this schema; {_ONE}"),
    "$dynamicRef": (REFUSED, "write `$ref`"),
    "$recursiveRef": (REFUSED, "write `$ref`"),
    "$defs": (SILENT, "schemas to refer to"),
    "definitions": (SILENT, "schemas to refer to"),
    "$id": (PARTLY, "says nothing at the root; refused elsewhere, where it would move what `$ref` means"),
    "$schema": (SILENT, "all are read as draft 2020-12"),
    "$anchor": (SILENT, "refused where a `$ref` names it"),
    "$dynamicAnchor": (SILENT, ""),
    "$vocabulary": (SILENT, ""),
    "$comment": (SILENT, ""),
    "type": (KEPT, "a name or a list of names"),
    "const": (PARTLY, "any value; integers of 64 bits; beside it `type` alone"),
    "enum": (PARTLY, "any values; integers of 64 bits; beside it `type` alone"),
    "anyOf": (PARTLY, f"{_ONE}, but for a `type` that all branches have"),
    "oneOf": (
        PARTLY,
        "as `anyOf`, where types, values or a required property show that no value fits two branches",
    ),
    "allOf": (PARTLY, f"of one branch; {_ONE}, but for its `type`"),
    "not": (REFUSED, "name what is allowed"),
    "if": (REFUSED, "use `anyOf` of whole schemas"),
    "then": (REFUSED, "use `anyOf` of whole schemas"),
    "else": (REFUSED, "use `anyOf` of whole schemas"),
    "dependentRequired": (REFUSED, "use `anyOf` of whole schemas"),
    "dependentSchemas": (REFUSED, "use `anyOf` of whole schemas"),
    "dependencies": (REFUSED, "use `anyOf` of whole schemas"),
    "properties": (KEPT, "in their order"),
    "required": (PARTLY, "names of `properties`"),
    "additionalProperties": (KEPT, "left out: none"),
    "unevaluatedProperties": (KEPT, "left out: none"),
    "patternProperties": (PARTLY, "of one pattern, without `properties`"),
    "propertyNames": (PARTLY, "schema of a string; without `properties` and `patternProperties`"),
    "minProperties": (PARTLY, "above 1 only where no property but `properties` may be"),
    "maxProperties": (KEPT, ""),
    "items": (PARTLY, "one schema; a list is `prefixItems` today"),
    "prefixItems": (PARTLY, "schemas other than true and false"),
    "additionalItems": (SILENT, "beside one schema of `items`"),
    "unevaluatedItems": (KEPT, "beside `prefixItems`"),
    "minItems": (PARTLY, "with `items`, or as many `prefixItems`"),
    "maxItems": (KEPT, ""),
    "uniqueItems": (PARTLY, "false, or of one item at most"),
    "contains": (REFUSED, "describe all items"),
    "minContains": (SILENT, "without `contains`"),
    "maxContains": (SILENT, "without `contains`"),
    "minLength": (PARTLY, "without `pattern` and a `format` that is kept to"),
    "maxLength": (PARTLY, "without `pattern` and a `format` that is kept to"),
    "pattern": (
        PARTLY,
        "the whole string; no look-around, `\\b`, `\\p`, references back, characters that JSON escapes",
    ),
    "format": (PARTLY, "those of the table below; a name of no standard says nothing"),
    "minimum": (PARTLY, "of integers a whole one of 64 bits; other numbers have at most six decimals"),
    "maximum": (PARTLY, "as `minimum`"),
    "exclusiveMinimum": (PARTLY, "as `minimum`; a number, not true or false"),
    "exclusiveMaximum": (PARTLY, "as `minimum`; a number, not true or false"),
    "multipleOf": (PARTLY, "of integers: 1 to 1024, without bounds or between two that are at most 10000 apart"),
    "title": (SILENT, ""),
    "description": (SILENT, ""),
    "default": (SILENT, ""),
    "examples": (SILENT, ""),
    "deprecated": (SILENT, ""),
    "readOnly": (SILENT, ""),
    "writeOnly": (SILENT, ""),
    "nullable": (SILENT, 'OpenAPI\'s; write `type: [..., "null"]`'),
    "discriminator": (SILENT, "OpenAPI's"),
    "contentEncoding": (SILENT, ""),
    "contentMediaType": (SILENT, ""),
    "contentSchema": (SILENT, ""),
}
"""Of each keyword, what becomes of it, and within which limits. Others say nothing, as the standard has it."""

_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"([0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-{_DAY}|{_LEAP_YEAR}-02-29"
_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_MINUTE})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_WORD = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,30}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_UP_TO = ["", _GROUP, *(f"{_GROUP}(:{_GROUP}){{0,{count}}}" for count in range(1, 7))]
_SHORTENED = "|".join(f"({_UP_TO[before]})?::({_UP_TO[7 - before]})?" for before in range(1, 7))
_PERIOD = "([0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D)"
_CLOCK = "T([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|[0-9]{1,9}S)"
_URI_CHARACTER = "([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T{_TIME}",
    "duration": f"P({_PERIOD}({_CLOCK})?|{_CLOCK}|[0-9]{{1,9}}W)",
    "email": f"{_WORD}(\\.{_WORD}){{0,1}}@{_LABEL}(\\.{_LABEL}){{0,2}}",
    "hostname": f"{_LABEL}(\\.{_LABEL}){{0,2}}",
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|{_SHORTENED}|::",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(//{_LABEL}(\\.{_LABEL}){{0,3}}(:[0-9]{{1,4}})?)?(/{_URI_CHARACTER}*)?",
    "json-pointer": "(/([^~/]|~[01])*)*",
    "relative-json-pointer": "(0|[1-9][0-9]{0,9})(#|(/([^~/]|~[01])*)*)",
    **dict.fromkeys(("uri-reference", "uri-template", "idn-email", "idn-hostname", "iri", "iri-reference", "regex")),
}
"""Formats of draft 2020-12 and what is written for them, always a text of the format; None: refused."""

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # xgrammar goes by the first of these that is there
_OBJECT = (
    *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties"),
)
_ARRAY = ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems")
_STRING = ("minLength", "maxLength", "pattern", "format")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ASSERTING = (*_DECIDING, "type", *_OBJECT, *_ARRAY, *_STRING, *_NUMBER)
_SCHEMAS_OF_TAGS = ("json_schema", "schema")  # the latter of tags as xgrammar had them before
_MOST = (1 << 31) - 1
_INT64 = range(-(1 << 63), 1 << 63)

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist = 3, 3, 3

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]
Blame = Callable[[str, str], "_Fault"]


@dataclass(frozen=True)
class _Fault(Exception):
    """A keyword that is not kept to.

    Attributes:
        path: to it, from the root.
        reason: what is wrong with it.
    """

    path: Path
    reason: str


def check_schema(schema: Any, field: str, within: str = "") -> None:
    """Returns if a grammar keeps to a schema.

    Args:
        schema: as JSON has it.
        field: of the request, for the error.
        within: where in the field it is.

    Raises:
        InvalidArgumentError: naming the keyword that it would not keep to, and its path.
    """
    try:
        _Audit(schema).check()
    except _Fault as fault:
        value = _short(_at(schema, fault.path))
        place = f"{within}{_pointer(fault.path)}"
        raise InvalidArgumentError(f"{field} at {place} is {value}; {fault.reason}", field) from None


def written_text(text: str, field: str) -> str:
    """A JSON schema as the compiler takes it.

    Raises:
        InvalidArgumentError: it is none, or a grammar does not keep to it.
    """
    schema = _read(text, field)
    check_schema(schema, field)
    return json.dumps(written_schema(schema))


def written_tag(text: str, field: str) -> str:
    """A structural tag of xgrammar with its schemas as the compiler takes them.

    Raises:
        InvalidArgumentError: it is no JSON, or a grammar does not keep to one of its schemas.
    """
    tag = _read(text, field)
    waiting: list[tuple[Any, Path]] = [(tag, ())]
    while waiting:
        part, path = waiting.pop()
        if isinstance(part, list):
            waiting += ((child, (*path, index)) for index, child in enumerate(part))
        elif isinstance(part, dict):
            for name in part:
                if name in _SCHEMAS_OF_TAGS:
                    check_schema(part[name], field, f"{_pointer((*path, name))}, ")
                    part[name] = written_schema(part[name])
                else:
                    waiting.append((part[name], (*path, name)))
    return json.dumps(tag)


def _read(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{field} is no JSON: {error}", field) from None
    except RecursionError:
        raise InvalidArgumentError(
            f"{field} nests more than {MAX_DEPTH} levels deep, which is the limit", field
        ) from None


def relaxed(schema: Any, field: str) -> Any:
    """A schema without the keywords that a grammar would not keep to; for those who asked for no more.

    Raises:
        InvalidArgumentError: it is no schema.
    """
    try:
        _require_shallow(schema)
        schema = copy.deepcopy(schema)
        _Audit(schema, _leave_out).check()
    except _Fault as fault:
        raise InvalidArgumentError(f"{field} is {_short(schema)}; {fault.reason}", field) from None
    return schema


def _leave_out(schema: Any, fault: _Fault) -> None:
    if not fault.path:
        raise fault
    holder, name = _at(schema, fault.path[:-1]), fault.path[-1]
    if name == "oneOf" and isinstance(holder, dict) and "anyOf" not in holder:
        holder["anyOf"] = holder.pop("oneOf")  # which may be all that is wrong with it
    elif isinstance(holder, dict):
        del holder[name]
    else:
        holder[name] = {}


def _blame(root: Any, fault: _Fault) -> None:
    raise fault


class _Audit:
    """Looks at every schema that the root leads to.

    Args:
        root: of the schema.
        mend: takes the root and what is wrong with it; raises it, or makes it right.
    """

    def __init__(self, root: Any, mend: Callable[[Any, _Fault], None] = _blame) -> None:
        self._root, self._mend = root, mend
        self._budget = 20_000  # of comparisons; branches that refer to branches could ask for any number

    def check(self) -> None:
        """Raises ``_Fault`` at the first keyword that is not kept to, or has it mended."""
        _require_shallow(self._root)
        waiting: list[tuple[Any, Path]] = [(self._root, ())]
        seen: set[Path] = set()
        while waiting:
            schema, path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            while True:
                try:
                    children = self._checked(schema, path)
                except _Fault as fault:
                    self._mend(self._root, fault)
                    if fault.path == path:  # the whole of it
                        break
                else:
                    waiting += reversed(children)
                    break

    def _checked(self, schema: Any, path: Path) -> list[tuple[Any, Path]]:
        """What a schema leads to, if it is sound."""
        if isinstance(schema, bool):
            if not schema:
                raise _Fault(path, "nothing fits false; leave it out")
            return []
        if not isinstance(schema, dict):
            raise _Fault(path, "must be a schema: an object, or true")
        self._check(schema, path)
        return list(self._children(schema, path))

    def _check(self, schema: Schema, path: Path) -> None:
        def fault(keyword: str, reason: str) -> _Fault:
            return _Fault((*path, keyword), reason)

        for keyword in schema:
            verdict, note = KEYWORDS.get(keyword, (SILENT, ""))
            if verdict == REFUSED:
                raise fault(keyword, f"a grammar does not keep to {keyword}; {note}")
        if "$id" in schema and path:
            raise fault("$id", "is understood at the root alone; leave it out")
        deciding = next((keyword for keyword in _DECIDING if keyword in schema), None)
        if deciding is not None:
            may_stand = {deciding} if deciding == "$ref" else {deciding, "type"}
            if beside := [keyword for keyword in _ASSERTING if keyword in schema and keyword not in may_stand]:
                # Branches are blamed rather than what stands beside them, which strict false keeps then.
                blamed, other = (deciding, beside[0]) if "Of" in deciding else (beside[0], deciding)
                raise fault(
                    blamed, f"stands beside {other}, and a grammar keeps to one of them; make one schema of both"
                )
        types = self._own_types(schema, path)
        if deciding is not None:
            self._check_deciding(deciding, schema, fault, types)
        else:
            self._check_of_types(schema, fault, types)

    def _check_deciding(self, keyword: str, schema: Schema, fault: Blame, types: Sequence[str]) -> None:
        match keyword:
            case "$ref":
                self._check_ref(schema, fault)
            case "const":
                _check_values([schema["const"]], "const", schema, fault, types)
            case "enum":
                if not isinstance(schema["enum"], list) or not schema["enum"]:
                    raise fault("enum", "must be a list of at least one value")
                _check_values(schema["enum"], "enum", schema, fault, types)
            case "oneOf":
                self._check_disjoint(self._branches("oneOf", schema, fault, types), fault)
            case "anyOf":
                self._branches("anyOf", schema, fault, types)
            case "allOf":
                if len(self._branches("allOf", schema, fault, types)) > 1:
                    raise fault("allOf", "a grammar keeps to one branch alone; put them into one schema")

    def _check_of_types(self, schema: Schema, fault: Blame, types: Sequence[str]) -> None:
        if "type" not in schema:
            implied = _implied(schema)
            if implied is None:
                asked = [keyword for keyword in _ASSERTING if keyword in schema]
                if asked:
                    raise fault(asked[0], "a grammar keeps to it only beside a type; give the type")
                return
            types = (implied,)
        if "object" in types:
            _check_object(schema, fault)
        if "array" in types:
            _check_array(schema, fault)
        if "string" in types:
            _check_string(schema, fault)
        if "integer" in types:
            _check_integer(schema, fault)
        if "number" in types:
            _check_number(schema, fault)

    def _own_types(self, schema: Schema, path: Path) -> tuple[str, ...]:
        given = schema.get("type", list(_TYPES))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or any(each not in _TYPES for each in types):
            raise _Fault((*path, "type"), f"must be of {', '.join(_TYPES)}, or a list of some")
        return tuple(types)

    def _check_ref(self, schema: Schema, fault: Blame) -> None:
        followed: set[str] = set()
        while isinstance(schema, dict) and "$ref" in schema:
            reference = schema["$ref"]
            try:
                schema = self._target(reference)[0]
            except ValueError as error:
                raise fault("$ref", str(error)) from None
            if reference in followed:
                raise fault("$ref", "leads back to itself")
            followed.add(reference)

    def _check_disjoint(self, branches: Sequence[Any], fault: Blame) -> None:
        for index, branch in enumerate(branches):
            for other in range(index):
                if not self._are_disjoint(branch, branches[other], MAX_DEPTH):
                    reason = f"one value may fit branches {other} and {index}, and a grammar cannot tell; use anyOf"
                    raise fault("oneOf", reason)

    def _branches(self, keyword: str, schema: Schema, fault: Blame, types: Sequence[str]) -> list[Any]:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise fault(keyword, "must be a list of at least one schema")
        if "type" in schema and not all(_within(self._types(branch), types) for branch in branches):
            raise fault("type", f"stands beside {keyword}, of which a branch may be of another; give each its type")
        return branches

    def _children(self, schema: Schema, path: Path) -> Iterator[tuple[Any, Path]]:
        """The schemas that a sound one leads to, in its order."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
            return
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                yield from ((branch, (*path, keyword, index)) for index, branch in enumerate(schema[keyword]))
                return
        if "const" in schema or "enum" in schema:
            return
        types = self._types(schema)
        if "object" in types:
            for keyword in ("properties", "patternProperties"):
                yield from ((child, (*path, keyword, name)) for name, child in schema.get(keyword, {}).items())
            for keyword in ("additionalProperties", "unevaluatedProperties"):
                if schema.get(keyword, False) is not False:
                    yield schema[keyword], (*path, keyword)
            if (names := schema.get("propertyNames")) is not None:
                yield names if _values(names) is not None else {"type": "string", **names}, (*path, "propertyNames")
        if "array" in types:
            yield from ((child, (*path, "prefixItems", i)) for i, child in enumerate(schema.get("prefixItems", ())))
            for keyword in ("items", "unevaluatedItems"):
                if schema.get(keyword, False) is not False:
                    yield schema[keyword], (*path, keyword)

    def _target(self, reference: Any) -> tuple[Any, Path]:
        """What a reference means, and where that is; a ValueError says why it means nothing."""
        if reference == "#":
            return self._root, ()
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise ValueError("must be # or begin with #/: a place of this schema")
        names = reference[2:].split("/")
        if any(not name or set(name) & set("~%") for name in names):
            raise ValueError("has an empty name, a ~ or a % in its path, which a grammar does not read; rename it")
        found = self._root
        for name in names:
            if not isinstance(found, dict) or name not in found:
                raise ValueError(f"leads nowhere: there is no {name!r} on its way")
            found = found[name]
        return found, tuple(names)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            try:
                schema = self._target(schema["$ref"])[0]
            except ValueError:
                return True
        return True

    def _may_compare(self, count: int = 1) -> bool:
        self._budget -= count
        return self._budget > 0

    def _types(self, schema: Any, depth: int = MAX_DEPTH) -> set[str]:
        """Types that a value of the schema may have."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or not depth or not self._may_compare():
            return set(_TYPES)
        if (values := _values(schema)) is not None:
            return {next(each for each in ("integer", *_TYPES) if _is_of(value, [each])) for value in values}
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(keyword), list):
                return set().union(*(self._types(branch, depth - 1) for branch in branches))
        given = schema.get("type", _implied(schema) or list(_TYPES))
        return {each for each in ([given] if isinstance(given, str) else given) if isinstance(each, str)}

    def _are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        """Whether it is certain that no value fits both."""
        one, other = self._resolved(one), self._resolved(other)
        if not isinstance(one, dict) or not isinstance(other, dict) or not depth or not self._may_compare():
            return False
        for first, second in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf", "allOf"):
                if isinstance(branches := first.get(keyword), list):
                    return all(self._are_disjoint(branch, second, depth - 1) for branch in branches)
        first_values, second_values = _values(one), _values(other)
        if first_values is not None and second_values is not None:
            is_cheap = self._may_compare(len(first_values) * len(second_values))
            return is_cheap and not any(_equal(a, b) for a in first_values for b in second_values)
        types, others = self._types(one), self._types(other)
        if not any(_within({each}, others) or _within({third}, types) for each in types for third in others):
            return True
        if types != {"object"} or others != {"object"} or first_values or second_values:
            return False
        return any(
            self._are_disjoint(one["properties"][name], other["properties"][name], depth - 1)
            for name in _required(one) & _required(other)
        )


def _check_values(values: Sequence[Any], keyword: str, schema: Schema, fault: Blame, types: Sequence[str]) -> None:
    for value in values:
        if not _can_be_written(value):
            raise fault(keyword, f"has {_short(value)}, which is no JSON, or an integer of more than 64 bits")
        if "type" in schema and not _is_of(value, types):
            raise fault(keyword, f"has {_short(value)}, which is not of its type {_short(schema['type'])}")


def _required(schema: Schema) -> set[str]:
    """Properties that are required and described."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _implied(schema: Schema) -> str | None:
    """The type that xgrammar gives a schema without one; values of others, which would fit too, are not written."""
    if any(keyword in schema for keyword in ("properties", "additionalProperties", "unevaluatedProperties")):
        return "object"
    return "array" if any(keyword in schema for keyword in ("items", "prefixItems", "unevaluatedItems")) else None


def _check_object(schema: Schema, fault: Blame) -> None:
    properties = schema.get("properties", {})
    for keyword in ("properties", "patternProperties"):
        if not isinstance(schema.get(keyword, {}), dict):
            raise fault(keyword, "must be an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise fault("required", "must be a list of names")
    if missing := [name for name in required if name not in properties]:
        raise fault("required", f"has {_short(missing[0])}, which properties lacks; describe it there")
    least, most = _count(schema, "minProperties", fault), _count(schema, "maxProperties", fault)
    patterns = schema.get("patternProperties", {})
    if "patternProperties" in schema:
        if properties:
            raise fault("patternProperties", "stands beside properties, and a name may fit both; use one of them")
        if len(patterns) != 1:
            raise fault("patternProperties", "a grammar keeps to one pattern, since a name may fit several")
        for pattern in patterns:
            _check_pattern(pattern, lambda reason: fault("patternProperties", reason))
    if "propertyNames" in schema:
        if properties or patterns:
            raise fault("propertyNames", "a grammar keeps to it only without properties and patternProperties")
        if schema.get("additionalProperties") is False or schema.get("unevaluatedProperties") is False:
            raise fault("propertyNames", "names properties, and none may be; leave one of both out")
        names = schema["propertyNames"]
        if not isinstance(names, dict) or names.get("type", "string") != "string" or not _says_strings(names):
            raise fault("propertyNames", "must be a schema of a string: pattern, lengths or enum")
    has_others = bool(patterns) or "propertyNames" in schema or _additional(schema) is not False
    if least > 1 and has_others:
        raise fault("minProperties", "a name may be written twice, and then counts once; only 0 and 1 are kept to")
    if not has_others and least > len(properties):
        raise fault("minProperties", f"properties has {len(properties)}, and no others may be")
    if "maxProperties" in schema and most < max(least, len(set(required))):
        raise fault("maxProperties", "is less than what must be there")


def _says_strings(names: Schema) -> bool:
    allowed = {"type", "enum", "const", *_STRING}
    values = _values(names)
    return all(keyword not in _ASSERTING or keyword in allowed for keyword in names) and (
        values is None or all(isinstance(value, str) for value in values)
    )


def _additional(schema: Schema) -> Any:
    """What properties may be that ``properties`` does not describe; False: none."""
    return schema.get("additionalProperties", schema.get("unevaluatedProperties", False))


def _check_array(schema: Schema, fault: Blame) -> None:
    if isinstance(schema.get("items"), list):
        raise fault("items", "is a list, as before draft 2020-12; write prefixItems")
    prefix = schema.get("prefixItems", [])
    if not isinstance(prefix, list) or not all(isinstance(item, dict) for item in prefix):
        raise fault("prefixItems", "must be a list of schemas, each an object")
    least, most = _count(schema, "minItems", fault), _count(schema, "maxItems", fault)
    rest = schema.get("items", schema.get("unevaluatedItems", False))
    if "maxItems" in schema and most < least:
        raise fault("maxItems", f"is less than minItems, which is {least}")
    if "maxItems" in schema and most < len(prefix):
        raise fault("maxItems", f"is less than the {len(prefix)} of prefixItems; leave some out")
    if rest is False and least > len(prefix):
        raise fault("minItems", "no item is described that could be there; give items")
    if schema.get("uniqueItems", False) is not False and not ("maxItems" in schema and most <= 1):
        raise fault("uniqueItems", "a grammar does not keep to it; leave it out")


def _check_string(schema: Schema, fault: Blame) -> None:
    least, most = _count(schema, "minLength", fault), _count(schema, "maxLength", fault)
    if "maxLength" in schema and most < least:
        raise fault("maxLength", f"is less than minLength, which is {least}")
    form = schema.get("format")
    if not isinstance(form, str | None):
        raise fault("format", "must be a name")
    if form in FORMATS and FORMATS[form] is None:
        raise fault("format", "a grammar does not keep to it; leave it out, or write a pattern")
    decides = "format" if form in FORMATS else "pattern" if "pattern" in schema else None
    for keyword in ("pattern", "minLength", "maxLength"):
        if decides is not None and keyword in schema and keyword != decides:
            raise fault(keyword, f"stands beside {decides}, and a grammar keeps to that alone; leave one of both out")
    if "pattern" in schema:
        _check_pattern(schema["pattern"], lambda reason: fault("pattern", reason))


def _check_pattern(pattern: Any, fault: Callable[[str], _Fault]) -> None:
    if not isinstance(pattern, str):
        raise fault("must be a text")
    try:
        written_out(pattern)
    except PatternError as error:
        raise fault(f"a grammar does not keep to it: {_short(pattern)} {error}") from None


def _check_integer(schema: Schema, fault: Blame) -> None:
    bounds = {}
    for keyword in _NUMBER[:4]:
        if keyword in schema:
            value = schema[keyword]
            if not _is_of(value, ["integer"]) or int(value) not in _INT64:
                raise fault(keyword, "must be a whole number of 64 bits beside type integer")
            bounds[keyword] = int(value)
    low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf) + 1)
    high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf) - 1)
    step = schema.get("multipleOf", 1)
    if not _is_of(step, ["integer"]) or not 1 <= step <= 1024:
        raise fault("multipleOf", "must be a whole number in [1, 1024] beside type integer")
    if low > high or (math.isfinite(high - low) and low + -low % step > high):
        raise fault(next(iter(bounds)), "no integer fits its bounds")
    if step > 1 and bounds and not high - low < 10000:
        raise fault("multipleOf", "a grammar keeps to it without bounds, or between two at most 10000 apart")


def _check_number(schema: Schema, fault: Blame) -> None:
    if "multipleOf" in schema:
        raise fault("multipleOf", "a grammar keeps to it only beside type integer")
    low, high = Decimal("-Infinity"), Decimal("Infinity")
    for keyword in _NUMBER[:4]:
        if keyword not in schema:
            continue
        value = schema[keyword]
        if not _is_of(value, ["number"]) or abs(value) > 1e15:
            raise fault(keyword, "must be a number of at most 1e15")
        step = Decimal(0) if keyword in ("minimum", "maximum") else Decimal("1e-6")
        if "inimum" in keyword:
            low = max(low, Decimal(value) + step)
        else:
            high = min(high, Decimal(value) - step)
        if low > high or (low.is_finite() and high.is_finite() and high - low < Decimal("2e-6")):
            raise fault(keyword, "leaves no number of six decimals between the bounds")


def _count(schema: Schema, keyword: str, fault: Blame) -> int:
    """A count that a schema gives; 0 if it does not."""
    value = schema.get(keyword, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise fault(keyword, f"must be a whole number in [0, {_MOST}]")
    return value


def written_schema(schema: Any) -> Any:
    """A schema that passed ``check_schema`` as the compiler takes it: it says the same, or less."""
    if not isinstance(schema, dict):
        return schema
    found = {keyword: _written(keyword, value) for keyword, value in schema.items()}
    if (pattern := FORMATS.get(form) if isinstance(form := schema.get("format"), str) else None) is not None:
        del found["format"]
        found["pattern"] = written_out(pattern)
    properties, others = schema.get("properties"), _additional(schema)
    if properties and isinstance(properties, dict) and others is not False:
        # The names of others could be those of properties in disguise: "\u0061" is "a".
        found.pop("unevaluatedProperties", None)
        found |= {"patternProperties": {all_but(properties): written_schema(others)}, "additionalProperties": False}
    return found


def _written(keyword: str, value: Any) -> Any:
    match keyword, value:
        case "properties" | "$defs" | "definitions", dict():
            return {name: written_schema(child) for name, child in value.items()}
        case "patternProperties", dict():
            return {_written("pattern", name): written_schema(child) for name, child in value.items()}
        case "anyOf" | "oneOf" | "allOf" | "prefixItems", list():
            return [written_schema(child) for child in value]
        case "items" | "unevaluatedItems" | "additionalProperties" | "unevaluatedProperties" | "propertyNames", dict():
            return written_schema(value)
        case "pattern", str():
            try:
                return written_out(value)
            except PatternError:
                return value  # of a schema that nothing leads to
    return value


def _is_of(value: Any, types: Sequence[str]) -> bool:
    """Whether a value is of one of the types, as JSON Schema means them."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        is_whole = math.isfinite(value) and value == int(value)
        return math.isfinite(value) and ("number" in types or ("integer" in types and is_whole))
    kinds: dict[type, str] = {dict: "object", list: "array", str: "string", type(None): "null"}
    return kinds.get(type(value)) in types


def _within(types: Iterable[str], others: Iterable[str]) -> bool:
    """Whether all values of some types are of others."""
    others = set(others)
    return all(each in others or (each == "integer" and "number" in others) for each in types)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are one in JSON: 1 is 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return bool(one == other)


def _can_be_written(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_can_be_written(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_can_be_written, value))
    if isinstance(value, str):
        return not any(0xD800 <= ord(character) < 0xE000 for character in value)
    if isinstance(value, int):
        return value in _INT64
    return value is None or math.isfinite(value)


def _require_shallow(root: Any) -> None:
    level = [root]
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        if not (level := [child for part in parts for child in part]):
            return
    raise _Fault((), f"nests more than {MAX_DEPTH} levels deep, which is the limit")


def _at(schema: Any, path: Sequence[str | int]) -> Any:
    for name in path:
        schema = schema[name]
    return schema


def _pointer(path: Sequence[str | int]) -> str:
    """RFC 6901."""
    return "#" + "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in path)


def _short(value: Any) -> str:
    found = _BRIEF.repr(value)
    return found.encode("utf-8", "backslashreplace").decode()
