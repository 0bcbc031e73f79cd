"""Reasoning and answer in what a model writes, however the text is cut into tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import pytest
import xgrammar
import xgrammar.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.http.conversation import Plan
from orchestrator.http.errors import ApiError
from orchestrator.http.forms import Form, tag
from orchestrator.http.reasoning import PARSERS, Marks, Reasoning, ReasoningReader, reasoning_of
from orchestrator.http.settings import HttpSettings
from orchestrator.http.tool_reading import CallBegins, Reader, Text, Thought, Words
from orchestrator.http.tool_writing import HERMES
from orchestrator.tokenizer import Tokenizer
from pilotfish.cli.up import ReasoningParser

THINK, R1, GRANITE = PARSERS["qwen3"], PARSERS["deepseek_r1"], PARSERS["granite"]


class Letters(Tokenizer):
    """A tokenizer whose tokens are letters."""

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        self._special = special

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def is_special(self, text: str) -> bool:
        return text in self._special


def read(reader: Reader, pieces: Iterable[str]) -> tuple[str, str, int]:
    """Reasoning, answer, and how many of the pieces are reasoning."""
    parts = [part for piece in pieces for part in reader.read((piece,))] + list(reader.finish())
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    words = "".join(part.text for part in parts if isinstance(part, Words))
    assert all(part.text for part in parts if isinstance(part, Thought | Words))
    assert [type(part) for part in parts] == sorted(map(type, parts), key=[Thought, Words].index)
    return thought, words, reader.reasoning_tokens


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


ANSWERS = [
    # parser, whether the prompt has begun it, answer, reasoning, answer without it
    ("qwen3", None, "<think>\nso\n</think>\n\nHi.\n", "so", "Hi.\n"),
    ("qwen3", True, "so < so </thin </think>Hi.", "so < so </thin", "Hi."),
    ("qwen3", True, "<think>\nso</think>Hi.", "so", "Hi."),
    ("qwen3", None, " Hi. <think>so</think>", "", " Hi. <think>so</think>"),
    ("qwen3", None, "\n<think></think>Hi.", "", "Hi."),
    ("qwen3", None, "<thin", "", "<thin"),
    ("qwen3", None, "  ", "", "  "),
    ("qwen3", None, "", "", ""),
    ("qwen3", True, "so\n", "so\n", ""),
    ("qwen3", True, "so</think> a</think>", "so", "a</think>"),
    ("deepseek_r1", None, "so\n</think>\n\nHi.", "so", "Hi."),
    ("deepseek_r1", None, "<think>so</think>Hi.", "so", "Hi."),
    ("deepseek_r1", None, "so </thi", "so </thi", ""),
    ("deepseek_r1", None, "<thi", "<thi", ""),
    ("granite", None, "Here is my thought process:\nso\nHere's my response: Hi.", "so", "Hi."),
    ("granite", None, "Here is my answer: Hi.", "", "Here is my answer: Hi."),
    ("mistral", None, "[THINK]so[/THINK]Hi.", "so", "Hi."),
    ("seed_oss", None, "<seed:think>so</seed:think>Hi.", "so", "Hi."),
]


@pytest.mark.parametrize(("name", "begun", "answer", "thought", "words"), ANSWERS)
@settings(deadline=None)
@given(data=st.data())
def test_reasoning_is_told_from_the_answer(
    name: str, begun: bool | None, answer: str, thought: str, words: str, data: st.DataObject
) -> None:
    how = Reasoning(PARSERS[name], begun).plan(Plan((), None, HERMES), Letters())
    found = read(how.reader(), data.draw(cuts(answer)))
    assert found[:2] == (thought, words)


@pytest.mark.parametrize(("name", "begun", "answer", "thought", "words"), ANSWERS)
def test_tokens_of_the_reasoning_are_counted(
    name: str, begun: bool | None, answer: str, thought: str, words: str
) -> None:
    marks = PARSERS[name]
    ends = [answer.find(end) + len(end) for end in marks.ends if end in answer]
    has_thought = begun or marks.always or answer.lstrip().startswith(marks.begins)
    expected = 0 if not has_thought else min(ends, default=len(answer))
    reader = Reasoning(marks, begun).plan(Plan((), None, HERMES), Letters()).reader()
    assert read(reader, answer)[2] == expected
    reader = Reasoning(marks, begun).plan(Plan((), None, HERMES), Letters()).reader()
    list(reader.read(list(answer)))  # all in one round
    list(reader.finish())
    assert reader.reasoning_tokens == expected


@settings(deadline=None)
@given(st.text(alphabet="<think>/ \nab", max_size=40), st.booleans(), st.data())
def test_how_a_text_is_cut_changes_nothing(text: str, begins: bool, data: st.DataObject) -> None:
    whole = read(ReasoningReader(Text(), THINK, begins), [text])
    assert read(ReasoningReader(Text(), THINK, begins), data.draw(cuts(text)))[:2] == whole[:2]
    if not begins and not text.lstrip().startswith("<think>"):
        assert whole == ("", text, 0)


def test_reasoning_streams_before_it_is_complete() -> None:
    reader = ReasoningReader(Text(), THINK, begins=True)
    assert list(reader.read(("\nWell",))) == [Thought("Well")]
    assert list(reader.read((", so\n",))) == [Thought(", so")]
    assert reader.is_thinking
    assert list(reader.read(("</thi",))) == []
    assert list(reader.read(("nk>",))) == []
    assert reader.is_thinking  # white space may follow
    assert list(reader.read(("\n\n",))) == []
    assert list(reader.read(("Hi",))) == [Words("Hi")]
    assert not reader.is_thinking
    assert reader.reasoning_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "continued", "begun"),
    [
        ("user: <think> hi\nassistant: ", None, None),
        ("assistant: <think>\n", None, True),
        ("assistant: <think>\n\n</think>\n\n", None, False),
        ("assistant: x", "<think>so", True),
        ("assistant: x", "<think>so</think>Hi", False),
        ("assistant: x", "Hi", False),
        ("assistant: <think>", "", True),
    ],
)
def test_the_prompt_says_where_an_answer_begins(prompt: str, continued: str | None, begun: bool | None) -> None:
    assert reasoning_of(THINK, Letters(), list(map(ord, prompt)), continued).has_begun is begun


def takes(form: Form | None, text: str) -> bool:
    """By xgrammar itself."""
    assert form is not None
    grammar = xgrammar.Grammar.from_structural_tag(form.asked["structural_tag"])
    return bool(xgrammar.testing._is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize(
    ("marks", "begun", "taken", "refused"),
    [
        (THINK, True, ["so{}</think>\n\nyes", "</think>yes"], ["yes", "so</think>no", "so</think>yes</think>yes"]),
        (THINK, None, ["<think>so</think>yes", "yes"], ["so</think>yes", "<think>so yes", " so"]),
        (THINK, False, ["yes"], ["</think>yes", "<think></think>yes"]),
        (R1, None, ["so</think>yes", "<think>so</think>\nyes"], ["yes", "so"]),
        (
            GRANITE,
            None,
            ["Here is my thought process: so Here's my response: yes", "yes"],
            ["Here is my response: yes"],
        ),
    ],
)
def test_a_form_begins_behind_the_reasoning(
    marks: Marks, begun: bool | None, taken: list[str], refused: list[str]
) -> None:
    form = tag({"type": "const_string", "value": "yes"}, "response_format")
    how = Reasoning(marks, begun).plan(Plan((), form, HERMES), Letters())
    assert [text for text in taken if not takes(how.form, text)] == []
    assert [text for text in refused if takes(how.form, text)] == []
    assert how.form is not None
    assert how.form.field == "response_format"
    for text in taken:
        assert read(how.reader(), [text])[1] == "yes"


def test_a_structural_tag_is_of_the_whole_answer() -> None:
    form = Form({"structural_tag": "{}"}, "structured_outputs.structural_tag", {})
    assert Reasoning(THINK, None).plan(Plan((), form, HERMES), Letters()).form is form


def test_marks_that_no_grammar_has_are_refused_beside_a_form() -> None:
    form = tag({"type": "const_string", "value": "yes"}, "response_format")
    special = Letters(PARSERS["mistral"].ends)
    with pytest.raises(ApiError, match="response_format does not go with this model's reasoning"):
        Reasoning(PARSERS["mistral"], None).plan(Plan((), form, HERMES), special)
    assert Reasoning(PARSERS["mistral"], None).plan(Plan((), None, HERMES), special).form is None


def test_calls_are_read_behind_the_reasoning_alone() -> None:
    from orchestrator.http.bodies.tools import FunctionDefinition, Tool

    how = Plan([Tool(type="function", function=FunctionDefinition(name="f"))], None, HERMES, stops=["\n</tool_call>"])
    how = Reasoning(THINK, None).plan(how, Letters())
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reader = how.reader()
    parts = [*reader.read([f"<think>{call}</think>", f"\n\n{call}"]), *reader.finish()]
    assert [type(part) for part in parts[:2]] == [Thought, CallBegins]
    assert len(parts) == 3
    assert how.stops == ()  # which could stand in the reasoning, too


def test_parsers_go_by_the_same_names_everywhere() -> None:
    assert set(get_args(HttpSettings.model_fields["reasoning_parser"].annotation)) == {"", *PARSERS}
    assert set(get_args(ReasoningParser)) == set(PARSERS)
