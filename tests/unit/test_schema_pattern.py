"""Regular expressions of schemas: what is written of them, and what is refused."""

from __future__ import annotations

import re

import pytest

from orchestrator.schema_pattern import PatternError, all_but, written_out

TEXTS = ["", "a", "b", "ab", "abc", "aab", "a.b", "é", "12", "x-1", " ", "\U0001f600", "aaa", "ba", "Z_9"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "^$", "ab", "^a$|^b$", "^(a|b)?$", "(?:a|b)c*", "a+?b{1,2}?", "^(^a|b)$", "[^a]", "^[^a-c]+$", "."),
        *(r"^\w-\d$", r"\s", r"[\s\S]", r"^[\w.]+$", r"\u0061\x62", r"^\u{61}$", r"a\.b", "^[a\\]\\-]$", "^[é-ü]$"),
        *("^\U0001f600$", "(a(b)*)?c{0,3}", "[ -~]{2}", r"^(a|ab)(c|$)", "a{2,}"),
    ],
)
def test_what_is_written_matches_no_more_and_at_the_ends(pattern: str) -> None:
    written = re.compile(written_out(pattern))
    by_standard = re.compile(pattern.replace(r"\u{61}", "a"), re.ASCII)
    for text in TEXTS:
        if written.fullmatch(text):
            assert by_standard.search(text), text
        if by_standard.fullmatch(text):
            assert written.fullmatch(text) or not text.isascii(), text
    for text in ('"', "\\", "\n", "\x00", 'a"b'):
        assert not written.fullmatch(text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "as look-ahead"),
        ("(?!a)b", "as look-ahead"),
        ("(?<=a)b", "as look-ahead"),
        ("(?<x>a)", "as look-ahead and names"),
        (r"(a)\1", r"\1, which is not understood"),
        (r"a\bb", r"\b, which is not understood"),
        (r"\p{L}", r"\p, which is not understood"),
        ("a^b", "a ^ that is not at the start"),
        ("a$b", "a $ that is not at the end"),
        ("(a$)+", "a $ that is not at the end"),
        ("(^a)+", "a ^ that is not at the start"),
        ('"', "which JSON escapes"),
        (r"\\", "which JSON escapes"),
        (r"a\n", "which JSON escapes"),
        ('["\\\\]', "which JSON escapes"),
        ("[]", "an empty class"),
        (r"[^\s\S]", "leaves no character"),
        ("[z-a]", "in no order"),
        ("[[a]", "a [ within a class"),
        ("[a", "a [ that is not closed"),
        ("(a", "a ( that is not closed"),
        ("a)", "a ) too many"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("a{,3}", "nothing to repeat"),
        ("a{3,2}", "repeats nothing"),
        ("a{0}", "repeats nothing"),
        (r"\ud800", "no character"),
        ("(" * 60 + ")" * 60, "more than 50 deep"),
        ("a\\", "not understood"),
    ],
)
def test_what_no_grammar_can_stand_for_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=re.escape(reason)):
        written_out(pattern)


def test_all_texts_but_some() -> None:
    names = ["a", "ab", "ba", 'q"', "é", "a.b"]
    others = re.compile(all_but(names))
    for text in [*TEXTS, *names, "q", "qq", "abb", "a.", "a.bc", "éé"]:
        assert bool(others.fullmatch(text)) == (text not in names and '"' not in text), text
    assert not re.fullmatch(all_but([""]), "")
