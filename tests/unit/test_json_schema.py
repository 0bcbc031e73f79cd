"""Every keyword of JSON Schema is kept to or refused by name: texts drawn from compiled grammars are validated."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from schema_walks import schema_grammar, walks
from tiny_models import EOS_ID, byte_tokenizer, write_tokenizer

from orchestrator.json_schema import (
    FORMATS,
    KEPT,
    KEYWORDS,
    PARTLY,
    REFUSED,
    SILENT,
    check_schema,
    relaxed,
    written_schema,
    written_tag,
    written_text,
)
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.grammar import Grammars
from pilotfish.steps import Grammar, GrammarKind

WALKS = 10
DOCS = Path(__file__).parents[2] / "docs" / "structured_output.md"
NULL, WHOLE, TEXT = {"type": "null"}, {"type": "integer"}, {"type": "string", "maxLength": 3}
A = {"type": "object", "properties": {"kind": {"const": "a"}, "n": WHOLE}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}
TREE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["next"]}


def of(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **keywords}


# Of each keyword, schemas that a grammar keeps to, and those that it does not.
EXAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    "$ref": (
        [{"$ref": "#/$defs/C", "$defs": {"C": TEXT}}, {"$ref": "#/definitions/C", "definitions": {"C": WHOLE}}, TREE],
        [
            {"$ref": "#/$defs/C", "$defs": {"C": TEXT}, "minLength": 3},
            *({"$ref": name, "$defs": {"C": {"$anchor": "C"}}} for name in ("/$defs/C", "#C", "C", "https://a.b/c", 1)),
            *({"$ref": name, "$defs": {"C": [1]}} for name in ("#/$defs/D", "#/$defs/C/0")),
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}},
            {"$ref": "#"},
            {"$ref": "#/$defs/C", "$defs": {"C": {"$ref": "#/$defs/C"}}},
        ],
    ),
    "$dynamicRef": ([], [{"$dynamicRef": "#C", "$defs": {"C": {"$dynamicAnchor": "C"}}}]),
    "$recursiveRef": ([], [{"$recursiveRef": "#"}]),
    "$defs": ([{"$defs": {"C": {"not": {}}}, **NULL}], []),
    "definitions": ([{"definitions": {"C": {"pattern": "("}}, **NULL}], []),
    "$id": ([{"$id": "https://a.b/c", **WHOLE}], [of("array", items={"$id": "https://a.b/c", **WHOLE})]),
    "$schema": ([{"$schema": "http://json-schema.org/draft-07/schema#", **WHOLE}], []),
    "$anchor": ([{"$anchor": "C", **WHOLE}], []),
    "$dynamicAnchor": ([{"$dynamicAnchor": "C", **WHOLE}], []),
    "$vocabulary": ([{"$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True}, **WHOLE}], []),
    "$comment": ([{"$comment": "x", **WHOLE}], []),
    "type": (
        [
            *({"type": kind} for kind in ("object", "array", "string", "number", "integer", "boolean", "null")),
            {"type": ["string", "null", "integer"], "maxLength": 2, "minimum": 3},
        ],
        [],
    ),
    "const": (
        [{"const": value} for value in (None, True, 0, -0.0, 1.5, 1e300, -(2**63), "", 'é"\\\n😀/', [1, {"a": []}], {})]
        + [{"const": {"b": 1, "a": None}, "type": "object"}],
        [{"const": 2**63}, {"const": math.nan}, {"const": "\ud800"}, of("string", const=1), {"const": 1, "minimum": 2}],
    ),
    "enum": (
        [{"enum": [1, "a", None, {"b": [1]}, [], 1.5]}, of("string", enum=["a", "b"]), of("number", enum=[1, 1.5])],
        [{"enum": []}, {"enum": "ab"}, of("integer", enum=[1, "a"]), {"enum": [2**64]}, {"enum": [1], "minimum": 2}],
    ),
    "anyOf": (
        [{"anyOf": [WHOLE, TEXT]}, {"anyOf": [WHOLE, NULL], "type": ["number", "null"], "title": "x"}],
        [{"anyOf": []}, {"anyOf": [of("object", required=["a"])], "properties": {"a": NULL}}],
    ),
    "oneOf": (
        [
            {"oneOf": [WHOLE, TEXT, {"enum": [True, None]}]},
            {"oneOf": [A, B]},
            {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
            {"oneOf": [{"const": 1}, {"const": True}, {"enum": [2, [1]]}]},
        ],
        [
            {"oneOf": [WHOLE, of("number")]},
            {"oneOf": [{"const": 1}, {"const": 1.0}]},
            {"oneOf": [A, A | {"required": []}]},
            {"oneOf": [of("string", pattern="a"), of("string", pattern="b")]},
            {"oneOf": [WHOLE, True]},
            {"oneOf": [WHOLE, {"anyOf": [TEXT, WHOLE]}]},
        ],
    ),
    "allOf": (
        [{"allOf": [TEXT]}, {"allOf": [{"$ref": "#/$defs/C"}], "description": "x", "$defs": {"C": WHOLE}}],
        [{"allOf": [TEXT, of("string", minLength=2)]}, {"allOf": [{}, {}]}],
    ),
    "not": ([], [{"not": WHOLE}, of("string", **{"not": {"const": "a"}}), of("array", items={"not": {}})]),
    "if": ([], [{"if": WHOLE, "then": of("integer", minimum=3)}]),
    "then": ([], [of("integer", then={"minimum": 3})]),
    "else": ([], [of("integer", **{"else": {"minimum": 3}})]),
    "dependentRequired": ([], [of("object", properties={"a": NULL, "b": NULL}, dependentRequired={"a": ["b"]})]),
    "dependentSchemas": ([], [of("object", properties={"a": NULL, "b": NULL}, dependentSchemas={"a": {}})]),
    "dependencies": ([], [of("object", properties={"a": NULL, "b": NULL}, dependencies={"a": ["b"]})]),
    "properties": (
        [
            of("object", properties={"a": NULL, "": WHOLE, 'q"\\\n/é': TEXT}),
            {"properties": {"title": {"properties": {"title": WHOLE}}, "description": {"properties": {"title": TEXT}}}},
            of("object", properties={name: of("object", properties={"title": each}, required=["title"])
                                     for name, each in {"a": WHOLE, "b": NULL}.items()}, required=["a", "b"]),
        ],
        [],
    ),
    "required": (
        [of("object", properties={"a": NULL, "b": NULL}, required=["b"]), of("object", required=[])],
        [
            of("object", properties={"a": NULL}, required=["b"]),
            of("object", required=["a"]),
            {"required": ["a"]},
            of("object", properties={"a": NULL}, required="a"),
            of("object", patternProperties={"a": NULL}, required=["a"]),
        ],
    ),
    "additionalProperties": (
        [
            of("object", properties={"a": WHOLE, "ab": WHOLE}, additionalProperties=of("boolean")),
            of("object", properties={"a": WHOLE}, required=["a"], additionalProperties=True),
            of("object", properties={"a": WHOLE}, additionalProperties=False),
            of("object", additionalProperties=NULL),
            {"additionalProperties": WHOLE},
            of("object", additionalProperties=False),
        ],
        [],
    ),
    "unevaluatedProperties": (
        [
            of("object", properties={"a": WHOLE}, unevaluatedProperties=of("boolean")),
            of("object", properties={"a": WHOLE}, unevaluatedProperties=False),
            of("object", additionalProperties=NULL, unevaluatedProperties=False),
        ],
        [],
    ),
    "patternProperties": (
        [of("object", patternProperties={"^a[bc]*$": {}}), of("object", patternProperties={"b": {}}, maxProperties=1)],
        [
            of("object", properties={"a": NULL}, patternProperties={"^a?$": WHOLE}),
            of("object", patternProperties={"a": WHOLE, "b": TEXT}),
            of("object", patternProperties={"(?=a)": WHOLE}),
            {"patternProperties": {"a": WHOLE}},
        ],
    ),
    "propertyNames": (
        [
            of("object", propertyNames={"pattern": "^[a-c]{2}$"}, additionalProperties=NULL),
            of("object", propertyNames={"enum": ["a", "b"]}, additionalProperties=WHOLE),
            of("object", propertyNames={"maxLength": 2}),
        ],
        [
            of("object", properties={"abc": NULL}, propertyNames={"maxLength": 2}),
            of("object", propertyNames={"maxLength": 2}, additionalProperties=False),
            of("object", propertyNames=WHOLE),
            of("object", propertyNames={"enum": [1]}),
        ],
    ),
    "minProperties": (
        [
            of("object", properties=dict.fromkeys("abcd", NULL), minProperties=2),
            of("object", properties=dict.fromkeys("abcd", NULL), minProperties=2, maxProperties=3, required=["c"]),
            of("object", additionalProperties=NULL, minProperties=1),
        ],
        [
            of("object", additionalProperties=NULL, minProperties=2),
            of("object", properties={"a": NULL}, minProperties=2),
            of("object", minProperties=-1),
            {"minProperties": 1},
        ],
    ),
    "maxProperties": (
        [
            of("object", properties=dict.fromkeys("abcd", NULL), maxProperties=2),
            of("object", properties={"a": NULL}, maxProperties=0),
            of("object", additionalProperties=NULL, maxProperties=2),
            of("object", properties={"a": WHOLE}, additionalProperties=NULL, maxProperties=2, required=["a"]),
        ],
        [],
    ),
    "items": (
        [of("array", items=WHOLE), {"items": NULL}, of("array", items=False), of("array", items=True, maxItems=2)],
        [of("array", items=[WHOLE, TEXT]), {"items": [WHOLE], "additionalItems": False}],
    ),
    "prefixItems": (
        [of("array", prefixItems=[WHOLE, NULL], items=of("boolean"), minItems=1, maxItems=4), {"prefixItems": [NULL]}],
        [of("array", prefixItems=[True]), of("array", prefixItems=NULL)],
    ),
    "additionalItems": ([of("array", items=WHOLE, additionalItems=False)], []),
    "unevaluatedItems": (
        [
            of("array", prefixItems=[WHOLE], unevaluatedItems=False),
            of("array", prefixItems=[WHOLE], unevaluatedItems=NULL),
            of("array", items=WHOLE, unevaluatedItems=False),
        ],
        [],
    ),
    "minItems": (
        [of("array", items=WHOLE, minItems=2), of("array", prefixItems=[WHOLE, NULL], minItems=2)],
        [of("array", minItems=1), of("array", prefixItems=[{}], minItems=2), {"minItems": 1}, of("array", minItems=-1)],
    ),
    "maxItems": ([of("array", items={}, maxItems=2), of("array", items={}, maxItems=0), of("array", maxItems=1)], []),
    "uniqueItems": (
        [of("array", items=of("boolean"), uniqueItems=False), of("array", items=WHOLE, uniqueItems=True, maxItems=1)],
        [of("array", items=of("boolean"), uniqueItems=True), {"uniqueItems": True}],
    ),
    "contains": ([], [of("array", items=of("boolean"), contains={"const": True})]),
    "minContains": ([of("array", items=WHOLE, minContains=1)], []),
    "maxContains": ([of("array", items=WHOLE, maxContains=1)], []),
    "minLength": ([of("string", minLength=2)], [{"minLength": 2}, of("string", pattern="a*", minLength=3)]),
    "maxLength": (
        [of("string", minLength=1, maxLength=2), of("string", maxLength=0)],
        [of("string", format="date", maxLength=3), of("string", minLength=3, maxLength=2), of("string", maxLength=2.0)],
    ),
    "pattern": (
        [
            *(of("string", pattern=pattern) for pattern in ("^a[^b]{2}c$", "ab", "^.{3}$", "^a$|^b$", "^[éü]{2}$")),
            *(of("string", pattern=pattern) for pattern in (r"^\w+\s\d$", r"^[\u4e00-\u9fa5]{2}$", "[ -~]{3}", "^😀$")),
            *(of("string", pattern=pattern) for pattern in ("^(a(:a)*)?b$", "^(a(b(c*)?)?){0,2}d$", r"^[\s\S]{2}$")),
        ],
        [of("string", pattern=pattern) for pattern in ("(?=.*a)b", r"\bx", '^"$', r"(a)\1", "a$b", "(", 1)]
        + [{"pattern": "a"}],
    ),
    "format": (
        [of("string", format=name) for name in FORMATS if FORMATS[name]] + [of("string", format="int64")],
        [of("string", format=name) for name in FORMATS if not FORMATS[name]] + [{"format": "date"}],
    ),
    "minimum": (
        [
            *(of("integer", minimum=-3, maximum=120), of("integer", minimum=17), of("integer", minimum=2**62)),
            *(of("number", minimum=-0.5, maximum=3.25), of("number", minimum=0.1234567), of("number", minimum=1e14)),
        ],
        [
            *(of("integer", minimum=0.5), of("integer", minimum=5, maximum=4), of("integer", minimum=2**63)),
            *(of("number", minimum="1"), of("number", minimum=1e300), of("number", minimum=math.nan), {"minimum": 3}),
        ],
    ),
    "maximum": (
        [of("number", maximum=-1.5), of("integer", maximum=-7), {"type": ["integer", "number"], "maximum": 3}],
        [of("number", minimum=1e-9, maximum=2e-9), of("integer", maximum=True)],
    ),
    "exclusiveMinimum": (
        [of("integer", exclusiveMinimum=-3, exclusiveMaximum=1), of("number", exclusiveMinimum=0, exclusiveMaximum=1)],
        [of("number", minimum=3, exclusiveMinimum=True)],
    ),
    "exclusiveMaximum": (
        [of("number", minimum=0, exclusiveMaximum=0.5), of("integer", maximum=9, exclusiveMaximum=3)],
        [of("number", maximum=3, exclusiveMaximum=True), of("number", minimum=0, exclusiveMaximum=0)],
    ),
    "multipleOf": (
        [of("integer", multipleOf=7), of("integer", multipleOf=7, minimum=-9, maximum=99), of("integer", multipleOf=1)],
        [
            of("integer", multipleOf=7, minimum=0),
            of("integer", multipleOf=2000),
            of("integer", multipleOf=0.5),
            of("number", multipleOf=0.1),
            {"multipleOf": 3},
        ],
    ),
    "nullable": ([of("integer", nullable=True)], []),
    "discriminator": ([{"oneOf": [A, B], "discriminator": {"propertyName": "kind"}}], []),
    "contentEncoding": ([of("string", contentEncoding="base64", maxLength=2)], []),
    "contentMediaType": ([of("string", contentMediaType="application/json", maxLength=2)], []),
    "contentSchema": ([of("string", contentSchema={"not": {}}, maxLength=2)], []),
    **{
        name: ([{name: value, **WHOLE}], [])
        for name, value in {
            "title": "x",
            "description": "x",
            "default": "x",
            "examples": ["x"],
            "deprecated": True,
            "readOnly": True,
            "writeOnly": True,
        }.items()
    },
}  # fmt: skip
INSTEAD = {
    # What is blamed where two keywords do not go together.
    "$ref": ("minLength",),
    "const": ("minimum",),
    "enum": ("minimum",),
    "propertyNames": ("type", "enum"),
    "minLength": ("maxLength",),
    "maximum": ("minimum",),
    "exclusiveMaximum": ("minimum",),
}
GOOD = [(keyword, schema) for keyword, (good, _) in EXAMPLES.items() for schema in good]
BAD = [(keyword, schema) for keyword, (_, bad) in EXAMPLES.items() for schema in bad]
GOOD += [("", True), ("", {}), ("", {"x-of-nobody": 1, **WHOLE}), ("", of("string", minimum=3, maxLength=2))]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_tokenizer()), waits=True)


def name_of(value: Any) -> str:
    return ascii(value)[:60]


def read(texts: Iterator[str], schema: Any) -> int:
    """How many texts there are; all fit the schema."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    values = [json.loads(text) for text in texts]
    for value in values:
        validator.validate(value)
    return len(values)


def test_every_keyword_has_its_examples_and_they_its_verdict() -> None:
    assert EXAMPLES.keys() == KEYWORDS.keys()
    for keyword, (verdict, _) in KEYWORDS.items():
        good, bad = EXAMPLES[keyword]
        assert (bool(good), bool(bad)) == {
            KEPT: (True, False),
            PARTLY: (True, True),
            REFUSED: (False, True),
            SILENT: (True, False),
        }[verdict], keyword


@pytest.mark.parametrize(("keyword", "schema"), GOOD, ids=name_of)
def test_texts_of_what_is_taken_fit_their_schema(keyword: str, schema: Any, grammars: Grammars) -> None:
    text = written_text(json.dumps(schema), "json_schema")
    assert read(walks(grammars, schema_grammar(text), WALKS), schema)


@pytest.mark.parametrize(("keyword", "schema"), BAD, ids=name_of)
def test_what_is_not_kept_to_is_refused_by_keyword_and_path(keyword: str, schema: Any) -> None:
    for whole, path in ((schema, "#"), (of("array", items=of("object", properties={"a/b": schema})), "")):
        if not path and "$ref" in json.dumps(schema):
            continue  # which leads elsewhere then
        with pytest.raises(InvalidArgumentError) as refusal:
            check_schema(whole, "json_schema")
        assert refusal.value.field == "json_schema"
        place = str(refusal.value).partition("json_schema at ")[2].partition(" is ")[0]
        assert place.startswith(path or "#/items/properties/a~1b"), place
        siblings = {
            "minLength",
            "maxLength",
            "minimum",
            "properties",
            "additionalProperties",
            "exclusiveMaximum",
            "type",
        }
        assert keyword in place or place.rpartition("/")[2] in siblings | {"if", "items", "maximum"}, place


@pytest.mark.parametrize(("keyword", "schema"), BAD, ids=name_of)
def test_what_strict_false_leaves_is_kept_to(keyword: str, schema: Any, grammars: Grammars) -> None:
    left = relaxed(schema, "schema")
    check_schema(left, "schema")
    assert json.dumps(relaxed(left, "schema")) == json.dumps(left)


def test_what_is_relaxed_says_the_rest() -> None:
    schema = of(
        "object", properties={"a": of("array", items=WHOLE | {"not": {}}, uniqueItems=True), "b": TEXT}, required=["b"]
    )
    left = of("object", properties={"a": of("array", items=WHOLE), "b": TEXT}, required=["b"])
    assert relaxed(schema, "schema") == left
    assert "uniqueItems" in schema["properties"]["a"], "the caller's own"
    assert relaxed({"oneOf": [WHOLE, of("number")]}, "schema") == {"anyOf": [WHOLE, of("number")]}
    beside = of("object", properties={"a": NULL})
    assert relaxed(beside | {"anyOf": [{"required": ["a"]}]}, "schema") == beside


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "at # is False; nothing fits false"),
        ([], "at # is []; must be a schema"),
        (of("nonsense"), "at #/type is 'nonsense'; must be of object, array"),
        ({"type": []}, "at #/type is []"),
        (of("object", properties={"a": False}), "at #/properties/a is False"),
        (of("array", items=of("object", properties={"a": {"$ref": "#/items/x"}})), "at #/items/properties/a/$ref is"),
        ({"$ref": "#/$defs/C", "$defs": {"C": of("array", uniqueItems=True)}}, "at #/$defs/C/uniqueItems is True"),
    ],
    ids=name_of,
)
def test_errors_name_the_place_and_the_value(schema: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        check_schema(schema, "json_schema")
    assert f"json_schema {message}" in str(refusal.value)


@pytest.mark.parametrize("levels", [200, 5000])
def test_a_schema_that_nests_too_deep_is_refused(levels: int) -> None:
    with pytest.raises(InvalidArgumentError, match="nests more than 100 levels deep"):
        written_text('{"items":' * levels + "{}" + "}" * levels, "json_schema")


@pytest.mark.parametrize("text", ["{", "", "nonsense"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="json_schema is no JSON: "):
        written_text(text, "json_schema")


def test_a_large_enum_is_checked_at_once(grammars: Grammars) -> None:
    schema = {"enum": [f"value number {index}" for index in range(3000)]}
    text = written_text(json.dumps(schema), "json_schema")
    assert read(walks(grammars, schema_grammar(text), 3), schema) == 3


def nested(leaf: Any, levels: int = 40) -> dict[str, Any]:
    """Branches that refer to branches, two on every level: definitions, of which d0 is the first."""
    found = {f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)}
    return found | {f"d{levels}": leaf}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"$ref": "#/$defs/d0"}, TEXT], "$defs": nested(WHOLE)},
        {"anyOf": [{"$ref": "#/$defs/d0"}], "type": "integer", "$defs": nested(WHOLE)},
        {"oneOf": [{"const": index} for index in range(4000)]},
        {"oneOf": [{"enum": list(range(6000))}, {"enum": list(range(6000, 12000))}]},
        of("object", properties={"x" * 60000: NULL}, additionalProperties=True),
        of("string", pattern="[^" + "".join(map(chr, range(0x4E00, 0x4E00 + 15000))) + "]"),
        of("string", pattern="(a)" * 20000),
        of("array", items={"anyOf": [{"not": {}}] * 5000}),
    ],
    ids=name_of,
)  # fmt: skip
def test_no_schema_takes_long_to_check(schema: Any) -> None:
    """The orchestrator's one thread does it; seconds of it would be everybody's."""
    started = time.thread_time()
    with suppress(InvalidArgumentError):
        check_schema(schema, "schema")
    left = relaxed(schema, "schema")
    written_schema(left)
    assert time.thread_time() - started < 10


def tag_of(schema: Any) -> str:
    part = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    tags = [{"type": "tag", "begin": "", "content": part, "end": ""}]
    return json.dumps({"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": tags,
                       "separator": "\n", "at_least_one": True, "stop_after_first": True}})  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        of("object", properties={"a": of("string", minLength=1, maxLength=2), "b": WHOLE}, required=["a"]),
        of("object", properties={"a": WHOLE}, additionalProperties=NULL),
        {"$ref": "#/$defs/C", "$defs": {"C": of("array", items=of("string", format="date"), minItems=1)}},
        of("array", maxItems=2),
    ],
    ids=name_of,
)
def test_schemas_of_structural_tags_are_kept_to(schema: Any, grammars: Grammars) -> None:
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, written_tag(tag_of(schema), "structural_tag"), (EOS_ID,))
    assert read(walks(grammars, grammar, 2 * WALKS), schema)


def test_schemas_of_structural_tags_are_refused_by_their_place() -> None:
    place = "structural_tag at #/format/tags/0/content/json_schema, #/items/uniqueItems is True"
    with pytest.raises(InvalidArgumentError, match=place) as refusal:
        written_tag(tag_of(of("array", items=of("array", uniqueItems=True))), "structural_tag")
    assert refusal.value.field == "structural_tag"
    old = {"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": "</f>"}], "triggers": ["<f>"]}
    with pytest.raises(InvalidArgumentError, match="structural_tag at #/structures/0/schema, #/not is"):
        written_tag(json.dumps(old), "structural_tag")


def test_what_is_written_says_no_less_than_it_must() -> None:
    """A schema without what is rewritten comes through as it is."""
    schema = of("object", properties={"a": {"anyOf": [WHOLE, NULL]}, "b": of("array", items=TEXT)}, required=["a"])
    assert written_schema(schema) == schema


@pytest.mark.skipif(not DOCS.is_file(), reason="the docs are not installed")
def test_the_docs_show_the_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for keyword, (verdict, note) in KEYWORDS.items():
        assert f"\n| `{keyword}` | {verdict} | {note} |\n" in text, keyword
    shown = ", ".join(f"`{name}`" for name, pattern in FORMATS.items() if pattern)
    refused = ", ".join(f"`{name}`" for name, pattern in FORMATS.items() if not pattern)
    assert f"\n| kept to | {shown} |\n| refused | {refused} |\n" in text
