r"""Reading a final answer as a value: a number, a few numbers, or a word. Plain string work: no `eval`, no sympy.

Reads integers, decimals, thousands separators, fractions and mixed numbers, percentages, powers of ten, units and
currencies, the LaTeX that people write around them, and lists, tuples, sets and intervals of these. For everything
else it returns None; it never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 1_000
MAX_EXPONENT = 300
MAX_ITEMS = 50

_FULL_WIDTH = {ord("０") + i: ord("0") + i for i in range(10)}
_CHARACTERS = str.maketrans(
    _FULL_WIDTH
    | {ord(c): "-" for c in "−–﹣－"}
    | {ord(c): " " for c in "\u00a0\u2009\u202f\u3000~"}
    | {ord("％"): "%", ord("，"): ",", ord("．"): ".", ord("×"): r"\times ", ord("·"): r"\cdot ", ord("°"): ""}
)
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bigl|bigr|Bigl|Bigr|big|Big|limits)(?![a-zA-Z])|\\[!]|\^\{?\\circ\}?|\\degree|\\[()\[\]]"
)
_SPACES = re.compile(r"\\[,;: ]|\\(?:quad|qquad)(?![a-zA-Z])|\s+")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_NAMED = re.compile(r"(?:[a-zA-Z]|[a-zA-Z][a-zA-Z ]{0,30}|[a-zA-Z]\([a-zA-Z]\))\s*=(?!=)\s*")

_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}| )[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_DECIMAL = re.compile(rf"(?P<digits>{_DIGITS})")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{(?P<a>[^{}]*)\}|(?P<a1>[0-9]))\s*(?:\{(?P<b>[^{}]*)\}|(?P<b1>[0-9]))")
_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|([-+]?[0-9]{1,4}))|[eE]([-+]?[0-9]{1,4})(?![0-9a-zA-Z])"
)
_SLASH = re.compile(rf"\s*/\s*(?P<digits>{_DIGITS})")
_MIXED = re.compile(r"\s+(?P<a>[0-9]+)\s*/\s*(?P<b>[0-9]+)")
_UNIT_PART = re.compile(r"(?P<word>[a-zA-Z]+)\.?|[\s/]|\^\s*(?:[23]|\{[23]\})|(?P<other>.)")

_MATH_NAMES = "sqrt pi sin cos tan log ln exp frac infty inf nan or and mod infinity"
_SHORT_NAMES = "mm cm dm km m in ft yd mi mg g kg lb lbs oz ml l cl s ms h hr hrs min am pm mph kph of to"
_LONG_NAMES = "cents dollars hours minutes days years miles meters feet inches units degrees people"
_SCALE_NAMES = "hundred thousand million billion trillion plus minus divided squared cubed"
_MATH_WORDS = frozenset(_MATH_NAMES.split())
_SCALES = frozenset(_SCALE_NAMES.split())  # after a number they change its value, so they are no units
_SHORT_UNITS = frozenset(_SHORT_NAMES.split())
_JOINED_UNITS = _SHORT_UNITS | frozenset(_LONG_NAMES.split())  # may follow a number without a space


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number. `places` is the number of decimals in the text, None for a fraction."""

    value: Fraction
    places: int | None = 0
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """Numbers between brackets (`()`, `[]`, `[)`, `(]`, `{}`), or without any (`""`)."""

    brackets: str
    items: tuple[Number, ...]


Value = Number | Items | str
"""A `str` is a word or a choice, in lower case."""


def clean(text: str) -> str:
    """The answer without the LaTeX and punctuation around it, and without `x =` in front."""
    text = text.translate(_CHARACTERS).strip().strip("*").replace("\\$", "").replace("$", "")
    text = _DROPPED.sub("", text.replace("\\%", "%").replace("\\\\", "\\ "))
    text = _SPACES.sub(" ", _TEXT.sub(r" \1 ", text)).strip()
    text = text.rstrip(".,;: ").strip()
    name = _NAMED.match(text)
    return text[name.end() :] if name and text.count("=") == 1 else text


def read_value(text: str) -> Value | None:
    """The value of a cleaned answer, or None when it cannot be read here."""
    if not text or len(text) > MAX_LENGTH:
        return None
    number = read_number(text)
    if number is not None:
        return number
    return _read_items(text) or _read_word(text)


def read_number(text: str) -> Number | None:
    """The whole text as one number: sign, currency, digits or fraction, power of ten, percent, unit."""
    if text.startswith("(") and text.endswith(")") and "," not in text:
        text = text[1:-1].strip()
    negative = text.startswith("-")
    text = text[1:] if text[:1] in ("-", "+") else text
    text = text.lstrip().lstrip("€£$").lstrip()
    found = _read_magnitude(text)
    if found is None:
        return None
    value, places, rest = found
    rest, percent = _read_percent(rest)
    if not _is_unit(rest):
        return None
    return Number(-value if negative else value, places, percent)


def _read_magnitude(text: str) -> tuple[Fraction, int | None, str] | None:
    """An unsigned number at the start of a text, its decimals, and the rest of the text."""
    fraction = _FRACTION.match(text)
    if fraction:
        value = _ratio(fraction["a"] or fraction["a1"], fraction["b"] or fraction["b1"])
        return None if value is None else (value, None, text[fraction.end() :])
    digits = _DECIMAL.match(text)
    if not digits:
        return None
    value, places = _decimal(digits["digits"])
    rest = text[digits.end() :]
    if places == 0 and (fraction := _FRACTION.match(rest.lstrip())):
        part = _ratio(fraction["a"] or fraction["a1"], fraction["b"] or fraction["b1"])
        whole_rest = rest.lstrip()[fraction.end() :]
        return (value + part, None, whole_rest) if part is not None and 0 <= part < 1 else None
    if places == 0 and (mixed := _MIXED.match(rest)):
        part = _ratio(mixed["a"], mixed["b"])
        return (value + part, None, rest[mixed.end() :]) if part is not None and part < 1 else None
    if power := _POWER.match(rest):
        exponent = int(power[1] or power[2] or power[3])
        scaled = value * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
        return None if scaled is None else (scaled, max(0, places - exponent), rest[power.end() :])
    if slash := _SLASH.match(rest):
        divisor = _decimal(slash["digits"])[0]
        return (value / divisor, None, rest[slash.end() :]) if divisor else None
    return value, places, rest


def _decimal(digits: str) -> tuple[Fraction, int]:
    plain = digits.replace("{,}", "").replace(",", "").replace(" ", "")
    whole, _, decimals = plain.partition(".")
    return Fraction(int(whole + decimals or "0"), 10 ** len(decimals)), len(decimals)


def _ratio(above: str, below: str) -> Fraction | None:
    """a/b of two plain numbers, each with an optional sign."""
    parts = []
    for text in (above.strip(), below.strip()):
        sign = -1 if text.startswith("-") else 1
        digits = _DECIMAL.fullmatch(text.lstrip("+-").strip())
        if not digits:
            return None
        parts.append(sign * _decimal(digits["digits"])[0])
    return parts[0] / parts[1] if parts[1] else None


def _read_percent(rest: str) -> tuple[str, bool]:
    stripped = rest.lstrip()
    for word in ("%", "percent", "per cent"):
        if stripped.startswith(word):
            return stripped[len(word) :], True
    return rest, False


def _is_unit(rest: str) -> bool:
    """Whether the text after a number is empty or a unit: words of three letters or more, or well-known short ones."""
    if not rest.strip():
        return True
    parts = list(_UNIT_PART.finditer(rest))
    words = [part["word"].lower() for part in parts if part["word"]]
    if not words or any(part["other"] for part in parts) or not _MATH_WORDS.isdisjoint(words):
        return False
    if words[0] in _SCALES or (rest[0].isalpha() and words[0] not in _JOINED_UNITS):
        return False
    return all(word in _SHORT_UNITS or len(word) >= 3 for word in words)


def _read_items(text: str) -> Items | None:
    brackets, body = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        brackets, body = "{}", text[2:-2]
    elif text[0] in "([" and text[-1] in ")]":
        brackets, body = text[0] + text[-1], text[1:-1]
    elif not re.search(r",\s|\band\b|\bor\b", text):
        return None
    separator = r"," if brackets else r",\s+(?:and\s+|or\s+)?|\s+and\s+|\s+or\s+"
    parts = re.split(separator, body, maxsplit=MAX_ITEMS)
    if len(parts) > MAX_ITEMS or (len(parts) < 2 and brackets != "{}"):
        return None
    numbers = [read_number(_NAMED.sub("", part.strip(), count=1)) for part in parts]
    items = tuple(number for number in numbers if number is not None)
    return Items(brackets, items) if len(items) == len(parts) else None


def _read_word(text: str) -> str | None:
    """A choice (one letter, perhaps in brackets) or words of letters; None for text that could be mathematics."""
    word = text.strip("()").strip().lower()
    if not re.fullmatch(r"[a-z]|[a-z][a-z' -]{2,60}", word):
        return None
    parts = re.findall(r"[a-z]+", word)
    is_text = len(word) == 1 or all(len(part) >= 2 for part in parts)
    return word if is_text and not _MATH_WORDS.intersection(parts) else None
