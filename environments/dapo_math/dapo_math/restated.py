"""Tells whether an answer only repeats what its problem says, which algebra may well hold equal to the known answer."""

import re
from functools import lru_cache

from dapo_math.numbers import clean

# A line that asks for the value of what it spells out, such as `12 + 34 = ?`.
_ASKS_FOR_VALUE = re.compile(r"^[\d +\-*/^().]+= ?\?$", re.MULTILINE)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)


def restates(given: str, gold: str, problem: str, *, exactly: bool) -> bool:
    """Whether `given`, which is neither a number nor the same text as `gold`, only repeats what `problem` says.

    Args:
        given: the answer, cleaned.
        gold: the known answer, cleaned.
        problem: the problem or the whole prompt.
        exactly: it must be all that stands between two math delimiters, or hold a whole paragraph of text. A known
            number is asked for as a number, so there any part of the problem counts.
    """
    expression = _compact(given)
    if not expression or expression == _compact(gold):
        return False
    whole, parts, paragraphs = _read(problem)
    if exactly:
        return expression in parts or any(paragraph in expression for paragraph in paragraphs)
    if _ASKS_FOR_VALUE.search(problem):
        return True
    return bool(re.search(rf"(?<!\d)(?<!\d\.){re.escape(expression)}(?!\.?\d)", whole))


@lru_cache(maxsize=1024)
def _read(problem: str) -> tuple[str, frozenset[str], tuple[str, ...]]:
    """Compact: the problem, what stands in it between math delimiters, and its paragraphs that hold a word."""
    parts = (next(group for group in match.groups() if group) for match in _MATH.finditer(problem))
    paragraphs = tuple(_compact(clean(part)) for part in problem.split("\n\n") if _WORD.search(part))
    return _compact(clean(problem)), frozenset(_compact(clean(part)) for part in parts), paragraphs


def _compact(expression: str) -> str:
    """Without spaces, braces, a final full stop, and the choice among signs of multiplication and of division."""
    expression = re.sub(r"\\(?:times|cdot)(?![a-zA-Z])|×", "*", expression)
    expression = re.sub(r"\\div(?![a-zA-Z])|÷", "/", expression)
    return re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"[\s{}]", "", expression)).rstrip(".,;:?")
