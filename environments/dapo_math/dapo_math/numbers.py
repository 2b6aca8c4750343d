"""Reads integers and rationals exactly, in the spellings that people use; no floats, no evaluation of anything."""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 4000
_MAX_EXPONENT = 400
_MAX_GROUPS = 8  # each costs a pass over the text, and nobody means more than one

_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|bf|rm|boxed|fbox|mbox|displaystyle)\s*\{([^{}]*)\}"
)
_SPACING = re.compile(
    r"\\[,;:! ]|\\q?quad|~|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\limits|[\x00-\x08\u200b\ufeff]"
)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)\s*$")
_PERCENT = re.compile(r"\s*(?:\\%|%|\\?percent)\s*$")
_ASSIGNMENT = re.compile(r"^\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w{1,3}\}?)?\s*=\s*(?=[^=])")
_UNIT = re.compile(r"(?<=[\d})])\s*([A-Za-z][A-Za-z ./]*?)(?:\s*\^\s*\{?[23]\}?)?$")
# Words behind a number that change what it says, or are mathematics; "34 cm" has a unit, "34 or" and "34 pi" have not.
_NOT_UNITS = frozenset(
    {"and", "or", "not", "to", "plus", "minus", "times", "over", "more", "less", "at", "most", "least", "about", "than"}
    | {
        "approximately",
        "approx",
        "if",
        "else",
        "either",
        "between",
        "up",
        "down",
        "base",
        "factorial",
        "squared",
        "cubed",
    }
    | {"pi", "sqrt", "sin", "cos", "tan", "cot", "sec", "log", "ln", "exp", "mod", "inf", "infinity", "oo"}
    | {"hundred", "thousand", "million", "billion", "trillion", "dozen"}
)

_INT = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_NUMBER = re.compile(rf"([+-]?)\s*(?:({_INT})(?:\.(\d*))?|\.(\d+))", re.ASCII)
_SCIENTIFIC = re.compile(
    r"([+-]?[\d.]+)(?:\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))|[eE]([+-]?\d+))",
    re.ASCII,
)
_FRACTION = re.compile(
    r"([+-]?)\s*(?:(\d+)\s*)?\\[dtc]?frac\s*(?:\{\s*([^{}]+?)\s*\}|(\d))\s*(?:\{\s*([^{}]+?)\s*\}|(\d))", re.ASCII
)
_SLASH = re.compile(rf"([+-]?)\s*(?:(\d+)\s+)?\(?\s*([+-]?{_INT})\s*\)?\s*/\s*\(?\s*([+-]?{_INT})\s*\)?", re.ASCII)


@dataclass(frozen=True)
class ExactNumber:
    """A rational; `percent` where it was written with a percent sign, `value` then being the number in front of it."""

    value: Fraction
    percent: bool = False

    def equals(self, other: "ExactNumber") -> bool:
        """Equal as numbers; where just one of them carries a percent sign, equal with or without it."""
        if self.value == other.value:
            return True
        mine = self.value / 100 if self.percent else self.value
        theirs = other.value / 100 if other.percent else other.value
        return mine == theirs


def clean(text: str) -> str:
    """The text without typography: wrappers, spacing commands, outer braces, dollar signs, a final full stop."""
    text = text.replace("−", "-").replace("–", "-").replace("\\$", "").replace("$", "")
    text = text.replace(r"\(", "").replace(r"\)", "").replace("{,}", ",").replace("\\!", "").replace("\xa0", " ")
    text = _SPACING.sub(" ", text)
    for _ in range(4):
        simpler = _WRAPPERS.sub(r" \1 ", text)
        if simpler == text:
            break
        text = simpler
    text = re.sub(r"[ \t\n]+", " ", text).strip()
    text = text.rstrip(".").strip() if not re.search(r"\d\.$", text) else text[:-1].strip()
    for _ in range(_MAX_GROUPS):
        if not (text.startswith("{") and text.endswith("}") and _one_group(text)):
            break
        text = text[1:-1].strip()
    return text


def _one_group(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i == len(text) - 1
    return False


def read_exact(text: str) -> ExactNumber | None:
    """The integer or rational that `text` spells, or None where it is anything else.

    Reads `34`, `+34`, `1,034`, `1{,}034`, `034`, `34.0`, `.5`, `\\frac{9}{7}`, `9/7`, `1\\frac{1}{4}`, `1 1/4`,
    `1.5 \\times 10^{-3}`, `x = 34`, `34\\text{ cm}`, `336^\\circ`, `\\$18.00`, `25\\%`. ASCII digits alone.
    """
    if len(text) > MAX_DIGITS:
        return None
    text = clean(text)
    text = _ASSIGNMENT.sub("", text)
    text = _DEGREES.sub("", text)
    percent = bool(_PERCENT.search(text))
    text = _PERCENT.sub("", text).strip()
    unit = _UNIT.search(text)
    if unit:
        words = unit.group(1).lower().replace("/", " ").split()
        letters = unit.group(1).strip()
        if len(letters) < 2 or any(word.strip(".") in _NOT_UNITS for word in words):
            return None
        text = text[: unit.start()].strip()
    value = _rational(text)
    return None if value is None else ExactNumber(value, percent)


def _rational(text: str) -> Fraction | None:
    if match := _NUMBER.fullmatch(text):
        sign, whole, decimals, bare = match.groups()
        digits = (whole or "").replace(",", "").replace(" ", "")
        decimals = decimals or bare or ""
        value = Fraction(int(digits + decimals or "0"), 10 ** len(decimals))
        return -value if sign == "-" else value
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, *exponents = match.groups()
        exponent = int(next(e for e in exponents if e))
        base = _rational(mantissa)
        if base is None or abs(exponent) > _MAX_EXPONENT:
            return None
        return base * Fraction(10) ** exponent
    if match := _FRACTION.fullmatch(text):
        sign, whole, *parts = match.groups()
        return _mixed(sign, whole, parts[0] or parts[1], parts[2] or parts[3])
    if match := _SLASH.fullmatch(text):
        return _mixed(*match.groups())
    return None


def _mixed(sign: str, whole: str | None, above: str, below: str) -> Fraction | None:
    numerator, denominator = _rational(above), _rational(below)
    if numerator is None or not denominator:
        return None
    value = numerator / denominator
    if whole is not None:
        if not 0 < value < 1:  # "4 10/3" is no mixed number
            return None
        value += int(whole)
    return -value if sign == "-" else value
