"""Tells at once that two closed-form numbers differ, such as `3\\sqrt{13}` and `\\pi`; never that they agree.

Most wrong answers are other numbers than the right one, and floats are enough to see that. Numbers that are close, and
text that could be read in two ways, are left to exact algebra.
"""

import math
import re

_MAX_LENGTH = 200
_MAX_DEPTH = 20
_CLOSE = 1e-3
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|\\([a-zA-Z]+)|([-+*/^(){}\[\]]))", re.ASCII)
_OPERATORS = {"cdot": "*", "times": "*", "div": "/"}
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")


def certainly_differ(one: str, other: str) -> bool:
    """Whether both are closed forms of numbers that are further than 0.1% apart."""
    first = closed_form(one)
    if first is None:
        return False
    second = closed_form(other)
    return second is not None and abs(first - second) > _CLOSE * max(abs(first), abs(second), 1e-9)


def closed_form(text: str) -> float | None:
    """The value of digits, `\\frac`, `\\sqrt`, `\\pi` and arithmetic, or None where `text` has anything else."""
    tokens = _tokens(text)
    if not tokens:
        return None
    try:
        reader = _Reader(tokens)
        value = reader.sum(0)
    except (_UnclearError, ArithmeticError, ValueError):
        return None
    return value if reader.at == len(tokens) and math.isfinite(value) else None


class _UnclearError(Exception):
    """The text is no closed form, or can be read in more than one way."""


def _tokens(text: str) -> list[str]:
    if len(text) > _MAX_LENGTH:
        return []
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        if not (match := _TOKEN.match(text, at)):
            return []
        number, command, sign = match.groups()
        tokens.append(number or sign or _OPERATORS.get(command, "\\" + command))
        at = match.end()
    return tokens


class _Reader:
    """Recursive descent; each method reads what it is named for and moves on."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.next()
        if not token or (expected and token != expected):
            raise _UnclearError
        self.at += 1
        return token

    def sum(self, depth: int) -> float:
        if depth > _MAX_DEPTH:
            raise _UnclearError
        negative = self.next() == "-"
        if self.next() in ("+", "-"):
            self.at += 1
        value = self.product(depth)
        value = -value if negative else value
        while self.next() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product(depth)
        return value

    def product(self, depth: int) -> float:
        value, divided = self.power(depth), False
        while (token := self.next()) and token not in ("+", "-", ")", "}", "]"):
            if token in ("*", "/"):
                self.at += 1
                other = self.power(depth)
                value, divided = (value * other, divided) if token == "*" else (value / other, True)
            elif token == "^" or token[0].isdigit() or token in _FRACTIONS or divided:
                # `2 3`, `2\frac{1}{2}` (a mixed number?) and `1/2\pi` each have two readings.
                raise _UnclearError
            else:
                value *= self.power(depth)
        return value

    def power(self, depth: int) -> float:
        base = self.atom(depth)
        if self.next() != "^":
            return base
        self.at += 1
        exponent = self.group(depth) if self.next() == "{" else self.digit()
        if base < 0 or abs(exponent) > 64:
            raise _UnclearError
        return base**exponent

    def digit(self) -> float:
        token = self.take()
        if len(token) != 1 or not token.isdigit():
            raise _UnclearError
        return float(token)

    def group(self, depth: int) -> float:
        self.take("{")
        value = self.sum(depth + 1)
        self.take("}")
        return value

    def atom(self, depth: int) -> float:
        token = self.next()
        if token == "{":
            return self.group(depth)
        self.take()
        if token[0].isdigit():
            return float(token)
        if token == "(":
            value = self.sum(depth + 1)
            self.take(")")
            return value
        if token == "\\pi":
            return math.pi
        if token in _FRACTIONS:
            return self.group(depth) / self.group(depth)
        if token == "\\sqrt":
            root = 2.0
            if self.next() == "[":
                self.at += 1
                root = self.digit()
                self.take("]")
            radicand = self.group(depth) if self.next() == "{" else self.digit()
            if radicand < 0:
                raise _UnclearError
            return radicand ** (1 / root)
        raise _UnclearError
