"""Calls in what a model writes, however the text is cut into pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.http.tool_reading import Arguments, CallBegins, ForcedCalls, Part, Reader, Text, Words
from orchestrator.http.tool_writing import BARE, HERMES, Function, Writing, writing_of

NAMES = ("weather", "time")
Found = tuple[str, list[tuple[str, Any]]]


def read(reader: Reader, pieces: Iterable[str]) -> Found:
    """All text, and all calls with their arguments."""
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    parts += reader.finish()
    text, calls = "", []
    for part in parts:
        match part:
            case Words(words):
                assert words
                text += words
            case CallBegins(_, name):
                calls.append((name, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


ANSWERS: list[tuple[str, Found]] = [
    ("just text, \n ", ("just text, \n ", [])),
    ("", ("", [])),
    ("a <tool_cal and < more", ("a <tool_cal and < more", [])),
    ('<tool_call>\n{"name": "weather", "arguments": {"at": "x"}}\n</tool_call>', ("", [("weather", {"at": "x"})])),
    (
        'See.\n\n<tool_call>{"name": "weather", "arguments": {"at": "</b>"}}</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n',
        ("See.", [("weather", {"at": "</b>"}), ("time", {})]),
    ),
    ('<tool_call>{"name": "time"}</tool_call> done', (" done", [("time", {})])),
    ('<tool_call>{"name": "time", "arguments": {}}', ("", [("time", {})])),  # ended by a stop text
    ('<tool_call>{"name": "cook"}</tool_call>', ('<tool_call>{"name": "cook"}</tool_call>', [])),
    ('x <tool_call>{"name": "time", "argu', ('x <tool_call>{"name": "time", "argu', [])),
    ("<tool_call>[1]</tool_call>!", ("<tool_call>[1]</tool_call>!", [])),
    (
        '<tool_call>{"name": "weather", "arguments": {"at": "a\\"</tool_call>, <tool_call>{"}}</tool_call>',
        ("", [("weather", {"at": 'a"</tool_call>, <tool_call>{'})]),
    ),
    (
        'I use <tool_call> for it, or <tool_call>{..}.\n<tool_call>{"name": "time"}</tool_call>',
        ("I use <tool_call> for it, or <tool_call>{..}.", [("time", {})]),
    ),
    ('<tool_call> {"a": "b} <tool_call>{"name": "time"}', ('<tool_call> {"a": "b}', [("time", {})])),
    ('<tool_call>{"name": "weather", "arguments": "{\\"at\\": 1}"}</tool_call>', ("", [("weather", {"at": 1})])),
    ('<tool_call>{"name": "time", "arguments": ""}</tool_call>', ("", [("time", {})])),
    ('<tool_call>{"name": "time", "arguments": null}\n</tool_c', ("", [("time", {})])),
    ('<tool_call>{"name": "weather", "arguments": {"at": "1\n2"}}</tool_call>', ("", [("weather", {"at": "1\n2"})])),
    (
        '<tool_call>{"name": "time"}\n<tool_call>{"name": "time"}</tool_call><tool_call>{"name": "weather"}',
        ("", [("time", {}), ("time", {}), ("weather", {})]),
    ),
    ('<tool_call>{"name": "time"}} </tool_call>', ('<tool_call>{"name": "time"}} </tool_call>', [])),
    ('<tool_call>{"name": "time", "arguments": "3"}', ('<tool_call>{"name": "time", "arguments": "3"}', [])),
    ('<tool_call>{"name": "time", "arguments": NaN}', ('<tool_call>{"name": "time", "arguments": NaN}', [])),
    ('<tool_call>{"name": ["time"]}', ('<tool_call>{"name": ["time"]}', [])),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
@settings(deadline=None)
@given(data=st.data())
def test_calls_in_tags_are_found_and_all_else_stays_text(answer: str, expected: Found, data: st.DataObject) -> None:
    assert read(HERMES.reader(NAMES), data.draw(cuts(answer))) == expected


@settings(deadline=None)
@given(st.text(alphabet='<tool_cal>/{} \n"', max_size=60), st.data())
def test_text_without_a_call_passes_unchanged(text: str, data: st.DataObject) -> None:
    assert read(HERMES.reader(NAMES), data.draw(cuts(text))) == (text, [])
    assert read(BARE.reader(NAMES), data.draw(cuts(text))) == (text, [])
    assert read(Text(), data.draw(cuts(text))) == (text, [])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (' {"name": "time", "parameters": {"zone": [1, {}]}}', ("", [("time", {"zone": [1, {}]})])),
        ('{"name": "cook", "parameters": {}}', ('{"name": "cook", "parameters": {}}', [])),
        ('{"name": "time", "parameters": 3}', ('{"name": "time", "parameters": 3}', [])),
        ("{ is a brace", ("{ is a brace", [])),
        ('It is {"name": "time"}', ('It is {"name": "time"}', [])),
        ('{"name": "time"}; {"name": "weather", "parameters": "{}"}\n', ("", [("time", {}), ("weather", {})])),
        (
            '[{"name": "time"},\n{"name": "weather", "arguments": {"at": "]}"}}]',
            ("", [("time", {}), ("weather", {"at": "]}"})]),
        ),
        ('{"name": "time"} and {"name": "time"}', ('{"name": "time"} and {"name": "time"}', [])),
        ('{"name": "time"}; {"name": "cook"}', ('{"name": "time"}; {"name": "cook"}', [])),
        ("[1] a source", ("[1] a source", [])),
        ("[]", ("[]", [])),
    ],
)
@settings(deadline=None)
@given(data=st.data())
def test_a_bare_call_is_a_whole_answer(answer: str, expected: Found, data: st.DataObject) -> None:
    assert read(BARE.reader(NAMES), data.draw(cuts(answer))) == expected


@pytest.mark.parametrize("writing", [HERMES, BARE])
@settings(deadline=None)
@given(data=st.data())
def test_of_two_calls_one_is_left_where_one_is_allowed(writing: Writing, data: st.DataObject) -> None:
    call = f'{writing.opening}{{"name": "time", "{writing.argument_name}": {{}}}}{writing.closing}'
    answer = call + writing.separator + call.replace("time", "weather")
    assert read(writing.reader(NAMES, False), data.draw(cuts(answer))) == ("", [("time", {})])
    assert read(writing.reader(NAMES), data.draw(cuts(answer))) == ("", [("time", {}), ("weather", {})])


def test_arguments_are_json_that_can_be_sent() -> None:
    written = '<tool_call>{"name": "time", "arguments": {"half": "\\ud83d", "fish": "\U0001f41f"}}</tool_call>'
    found = "".join(part.json for part in HERMES.reader(NAMES).push(written) if isinstance(part, Arguments))
    assert json.loads(found.encode()) == {"half": "\ud83d", "fish": "\U0001f41f"}
    deep = f'<tool_call>{{"name": "time", "arguments": {"[" * 100_000}{"]" * 100_000}}}</tool_call>'
    assert read(HERMES.reader(NAMES), [deep]) == (deep, [])


def test_tags_without_calls_are_read_in_linear_time() -> None:
    """A model may be made to write anything; nobody else is to wait while it is read."""
    for written in ('<tool_call>{"' * 20_000, "<tool_call>{" * 20_000, '<tool_call>{"a": "' * 10_000 + '"' * 9):
        reader, begun = HERMES.reader(NAMES), time.perf_counter()
        assert "".join(part.text for part in [*reader.push(written), *reader.finish()] if isinstance(part, Words))
        assert time.perf_counter() - begun < 20


arguments = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.text(max_size=6) | st.integers() | st.none(), st.lists, max_leaves=5),
    max_size=3,
)


calls = st.lists(st.tuples(st.text(min_size=1, max_size=8), arguments), min_size=1, max_size=3)


@settings(deadline=None)
@given(calls, st.data())
def test_the_arguments_of_forced_calls_stream_as_they_are_written(
    expected: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    written = "\n".join(
        f'{HERMES.opening}{{"name": {json.dumps(name)}, "arguments": {json.dumps(values, ensure_ascii=False)}}}'
        + HERMES.closing
        for name, values in expected
    )
    assert read(ForcedCalls(), data.draw(cuts(written))) == ("", expected)
    name, values = expected[0]
    bare = json.dumps({"name": name, "parameters": values})
    assert read(ForcedCalls(), data.draw(cuts(bare))) == ("", [(name, values)])


def test_a_forced_call_streams_before_it_is_complete() -> None:
    reader = ForcedCalls()
    assert list(reader.push('<tool_call>\n{"name": "ti')) == []
    [begins, first] = reader.push('me", "arguments": {"zo')
    assert isinstance(begins, CallBegins)
    assert (begins.name, first) == ("time", Arguments('{"zo'))
    assert list(reader.push('ne": "}"')) == [Arguments('ne": "}"')]
    assert list(reader.push("}}\n</tool_")) == [Arguments("}")]
    assert list(reader.push("call>")) == []
    assert list(reader.finish()) == []


def test_the_template_tells_how_calls_are_written() -> None:
    assert writing_of("... <tool_call> ...") is HERMES
    assert writing_of("... {{ tools }} ...") is BARE


@pytest.mark.parametrize("writing", [HERMES, BARE])
@pytest.mark.parametrize("several", [True, False])
def test_forms_of_calls_are_read_as_they_are_allowed(writing: Writing, several: bool) -> None:
    """Against xgrammar itself: what the grammar takes, the readers understand."""
    import xgrammar.testing

    functions = [Function("weather", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})]
    functions.append(Function("time", {"type": "object"}))
    call = f'{writing.opening}{{"name": "weather", "{writing.argument_name}": {{"at": "x"}}}}{writing.closing}'
    other = f'{writing.opening}{{"name": "time", "{writing.argument_name}": {{}}}}{writing.closing}'
    wrong = call.replace('"x"', "3")

    def takes(part: dict[str, Any], text: str) -> bool:
        grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": part})
        return bool(xgrammar.testing._is_grammar_accept_string(grammar, text))

    only = writing.only_calls(functions, several)
    assert takes(only, call)
    assert takes(only, other)
    both = f"{call}{writing.separator}{other}"
    assert takes(only, both) is several
    assert (
        read(ForcedCalls(), [both])
        == read(writing.reader(NAMES), [both])
        == ("", [("weather", {"at": "x"}), ("time", {})])
    )
    assert not any(takes(only, text) for text in ("", "hello", wrong, f"hello {call}", call.replace("weather", "cook")))
    assert read(ForcedCalls(), [call]) == ("", [("weather", {"at": "x"})])
    within = writing.calls_in_text(functions, several)
    assert takes(within, "")
    assert takes(within, "hello")
    assert takes(within, call)
    assert not takes(within, wrong)
    if writing.has_tags:
        assert takes(within, f"hello {call}")
        assert read(writing.reader(NAMES), [f"hello {call}"]) == ("hello", [("weather", {"at": "x"})])
    assert read(writing.reader(NAMES), [call]) == ("", [("weather", {"at": "x"})])


def test_every_call_has_an_id_of_its_own() -> None:
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    ids = {part.id for part in HERMES.reader(NAMES).push(call * 3) if isinstance(part, CallBegins)}
    assert len(ids) == 3
