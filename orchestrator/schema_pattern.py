"""Regular expressions of JSON schemas, written out so that a grammar means by them what ECMA-262 does.

A grammar writes a string's characters themselves, and whole strings: so quotes, backslashes and control characters,
which JSON must escape, are taken out of every class; anchors may stand at the ends alone, where they say nothing; and
what depends on the text around a place (look-ahead, word boundaries, references back) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

Span = tuple[int, int]

_LAST = 0x10FFFF
_ESCAPED_BY_JSON: tuple[Span, ...] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_DIGITS: tuple[Span, ...] = ((0x30, 0x39),)
_WORDS: tuple[Span, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_ENDS: tuple[Span, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SPACES: tuple[Span, ...] = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_WIDE = {"d": _DIGITS, "w": _WORDS, "s": (*_SPACES, (0x85, 0x85), (0xFEFF, 0xFEFF))}
"""Where readers differ: ECMA-262 takes U+FEFF for a space, Python U+0085. Neither is written for one, or for none."""
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_REPEAT = re.compile(r"[*+?]|\{\d{1,4}(,\d{0,4})?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_MAX_DEPTH = 50
_MAX_COMPARED = 64  # characters; patterns grow with the square of them


class PatternError(ValueError):
    """A pattern that no grammar can stand for; the message says why."""


def written_out(pattern: str) -> str:
    """The pattern as a grammar takes it: the same strings, or fewer.

    Raises:
        PatternError: it cannot be, and why.
    """
    return _Reader(pattern).whole()


def all_but(texts: Collection[str]) -> str:
    """A pattern of all strings, as a grammar writes them, but these; of a long one, all that begin like it."""
    following: dict[str, set[Span]] = {"": set()}
    for text in texts:
        for index, character in enumerate(text):
            if not _without([(ord(character),) * 2], _ESCAPED_BY_JSON):
                break  # which no string has that is written so
            following[text[:index]].add((ord(character),) * 2)
            if index + 1 == _MAX_COMPARED:
                break
            following.setdefault(text[: index + 1], set())
    found = []
    for begun, spans in following.items():
        written = "".join(_written(ord(character), in_class=False) for character in begun)
        found += [written] if begun not in texts else []
        found.append(f"{written}{_excluding(spans)}{_excluding(())}*")
    return f"^({'|'.join(found)})$"


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def whole(self) -> str:
        found = self._alternatives(at_start=True, at_end=True)
        if self._at < len(self._text):
            raise PatternError("has a ) too many")
        return f"^({found})$"

    def _alternatives(self, at_start: bool, at_end: bool) -> str:
        """Up to the end, or to the parenthesis that closes.

        Args:
            at_start: whether nothing can stand before it.
            at_end: whether nothing can stand behind it.
        """
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"nests groups more than {_MAX_DEPTH} deep")
        found = [self._sequence(at_start, at_end)]
        while self._take("|"):
            found.append(self._sequence(at_start, at_end))
        self._depth -= 1
        return "|".join(found)

    def _sequence(self, at_start: bool, at_end: bool) -> str:
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._take("^"):
                if not at_start or parts:
                    raise PatternError("has a ^ that is not at the start")
                continue
            if self._take("$"):
                if not at_end or (self._at < len(self._text) and self._text[self._at] not in "|)"):
                    raise PatternError("has a $ that is not at the end")
                continue
            parts.append(self._repeated(at_start and not parts, at_end))
        return "".join(parts)

    def _repeated(self, at_start: bool, at_end: bool) -> str:
        if is_group := self._take("("):
            part = self._group(at_start, at_end)
        elif self._take("["):
            part = self._class()
        elif self._take("."):
            part = _excluding(_LINE_ENDS)
        else:
            part = self._character()
        if (repeat := _REPEAT.match(self._text, self._at)) is not None:
            self._at = repeat.end()
            _require_some(repeat)
            self._take("?")  # lazy: which of several matches is found makes no difference
            part = _optional(part, repeat) if is_group else part + repeat.group()
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise PatternError(f"has a {self._text[self._at]!r} with nothing to repeat; escape it if it is meant")
        return part

    def _group(self, at_start: bool, at_end: bool) -> str:
        if self._take("?") and not self._take(":"):
            raise PatternError("has a group with (?, as look-ahead and names; only (?: is understood")
        close = self._close()
        is_repeated = _REPEAT.match(self._text, close + 1) is not None
        is_last = close + 1 >= len(self._text) or self._text[close + 1] in "|)"
        found = self._alternatives(at_start and not is_repeated, at_end and is_last and not is_repeated)
        if not self._take(")"):
            raise PatternError("has a ( that is not closed")
        return f"({found})"

    def _close(self) -> int:
        """Where the group that begins here is closed."""
        depth, at, in_class = 1, self._at, False
        while at < len(self._text):
            character = self._text[at]
            if character == "\\":
                at += 1
            elif in_class:
                in_class = character != "]"
            elif character == "[":
                in_class = True
            elif character in "()":
                depth += 1 if character == "(" else -1
                if not depth:
                    return at
            at += 1
        raise PatternError("has a ( that is not closed")

    def _class(self) -> str:
        is_negated, spans = self._take("^"), list[Span]()
        while not self._take("]"):
            low = self._member(is_negated)
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member(is_negated)
                if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise PatternError("has a range in a class whose ends are in no order")
                low = [(low[0][0], high[0][1])]
            spans += low
        if not spans:
            raise PatternError("has an empty class")
        if is_negated:
            return _excluding(spans)
        if not (left := _without(spans, _ESCAPED_BY_JSON)):
            raise PatternError("has a class of quotes, backslashes or control characters alone, which JSON escapes")
        return _class_of(left)

    def _member(self, is_negated: bool) -> list[Span]:
        if self._at >= len(self._text):
            raise PatternError("has a [ that is not closed")
        if self._take("["):
            raise PatternError("has a [ within a class; escape it")
        if self._text[self._at] != "\\":
            self._at += 1
            return [(ord(self._text[self._at - 1]),) * 2]
        self._at += 1
        if (name := self._text[self._at : self._at + 1]).lower() in _SETS and name:
            self._at += 1
            found = (_SETS if name.islower() is not is_negated else _WIDE)[name.lower()]
            return list(found) if name.islower() else _without([(0, _LAST)], found)
        if self._take("b"):
            return [(0x08, 0x08)]
        return [(self._escape(),) * 2]

    def _character(self) -> str:
        character = self._text[self._at]
        self._at += 1
        code = ord(character)
        if character == "\\":
            name = self._text[self._at : self._at + 1]
            if name and name.lower() in _SETS:
                self._at += 1
                if name.isupper():
                    return _excluding(_WIDE[name.lower()])
                return _class_of(_without(_SETS[name], _ESCAPED_BY_JSON))
            code = self._escape()
        elif character in "*+?{":
            raise PatternError(f"has a {character!r} with nothing to repeat; escape it if it is meant")
        if not _without([(code, code)], _ESCAPED_BY_JSON):
            raise PatternError("asks for a quote, a backslash or a control character, which JSON escapes")
        return _written(code, in_class=False)

    def _escape(self) -> int:
        """The character that an escape stands for, behind its backslash."""
        if (found := _HEX.match(self._text, self._at)) is not None:
            self._at = found.end()
            if (code := int(next(filter(None, found.groups())), 16)) > _LAST or 0xD800 <= code < 0xE000:
                raise PatternError(f"has \\{found.group()}, which is no character")
            return code
        name = self._text[self._at : self._at + 1]
        self._at += 1
        if name in _CONTROLS and name:
            return _CONTROLS[name]
        if not name or name.isalnum() or name == "_":
            raise PatternError(f"has \\{name}, which is not understood")
        return ord(name)

    def _take(self, character: str) -> bool:
        is_next = self._text.startswith(character, self._at)
        self._at += is_next
        return is_next


def _require_some(repeat: re.Match[str]) -> None:
    low, comma, high = repeat.group().strip("{}").partition(",")
    most = high if comma else low
    if most.isdigit() and not 1 <= int(low) <= int(most) and not (int(low) == 0 < int(most)):
        raise PatternError(f"has {repeat.group()}, which repeats nothing")


def _optional(group: str, repeat: re.Match[str]) -> str:
    """A group repeated. xgrammar 0.2 lets the last loop of an optional group run without what comes before it: it
    writes :a for (a(:a)*)?."""
    if repeat.group() == "?":
        return f"({group}|)"
    if repeat.group().startswith("{0,") and repeat.group() != "{0,}":
        return f"({group}{{1,{repeat.group()[3:]}|)"
    return group + repeat.group()


def _without(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """Spans in order, less others."""
    left, cuts = list[Span](), sorted(taken)
    for first, last in sorted(spans):
        for low, high in cuts:
            if low > last:
                break
            if low > first:
                left.append((first, low - 1))
            first = max(first, high + 1)
        if first <= last:
            left.append((first, last))
    return left


def _excluding(spans: Iterable[Span]) -> str:
    if not _without([(0, _LAST)], (*spans, *_ESCAPED_BY_JSON)):
        raise PatternError("has a class that leaves no character")
    return "[^" + "".join(map(_span, sorted({*spans, *_ESCAPED_BY_JSON}))) + "]"


def _class_of(spans: Iterable[Span]) -> str:
    return "[" + "".join(map(_span, spans)) + "]"


def _span(span: Span) -> str:
    low, high = span
    return _written(low, in_class=True) + ("" if low == high else "-" + _written(high, in_class=True))


def _written(code: int, in_class: bool) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    if not in_class and character.isascii() and character.isprintable():
        return "\\" + character if character in r"\^$.*+?()[]{}|/" else character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else character
