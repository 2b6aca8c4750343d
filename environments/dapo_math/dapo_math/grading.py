"""Grades a response against a known answer: exact numbers at once, the rest by math-verify in a killable process."""

import asyncio
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dapo_math.closedform import certainly_differ
from dapo_math.extract import ParsedAnswer, parse_answer
from dapo_math.numbers import ExactNumber, clean, read_exact
from dapo_math.pool import CheckerError, CheckerTimeout, Equivalence, equivalent, equivalent_async, reads_async
from dapo_math.restated import restates

__all__ = ["CheckerError", "Grade", "Verdict", "agrade", "grade"]

Verdict = Literal["correct", "wrong", "no_answer", "unterminated", "unfinished_think", "timeout"]
VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "no_answer", "unterminated", "unfinished_think", "timeout")

_MAX_SYMBOLIC = 20_000
# What may stand in an expression that is to be evaluated to a number: arithmetic, no letters but these commands.
_ARITHMETIC = re.compile(
    r"(?:\\(?:frac|dfrac|tfrac|cdot|times|div|sqrt|pi)(?![a-zA-Z])|[\d\s+\-*/^().{}!\[\]])+", re.ASCII
)
# A date reads as a subtraction or a division, and a number with a leading zero in a longer expression is part of one.
_DATE = re.compile(r"\d{4}([-/])\d{1,2}\1\d{1,2}|\d{1,2}([-/])\d{1,2}\2\d{4}|.*(?<![\d.])0\d.*", re.ASCII)
_WORDS = re.compile(r"[A-Za-z][A-Za-z '\-]*")


@dataclass(frozen=True)
class Grade:
    """Args:
    reward: 1.0 for a correct answer, else 0.0.
    verdict: why.
    parsed: the text that was taken as the answer.
    last_line: whether the answer stood on the last line of the response.
    """

    reward: float
    verdict: Verdict
    parsed: str | None
    last_line: bool = False


def grade(response: str, answer: str, *, prompt_opened_think: bool = False, problem: str | None = None) -> Grade:
    """Grade `response` against the known `answer`. Works in any thread; takes at most a few seconds.

    Args:
        response: the model's whole reply.
        answer: the known answer.
        prompt_opened_think: the chat template ended the prompt inside `<think>`, so the reply starts in there.
        problem: the problem or the whole prompt, so that an answer which only repeats its expression earns nothing.

    Raises:
        CheckerError: the checking processes failed. This is a fault, not a wrong answer.
    """
    parsed = parse_answer(response, prompt_opened_think=prompt_opened_think)
    decided = _decide(parsed, answer, problem)
    if not isinstance(decided, Equivalence):
        return decided
    try:
        return _finish(parsed, equivalent(decided))
    except CheckerTimeout:
        return Grade(0.0, "timeout", parsed.text, parsed.last_line)


async def agrade(response: str, answer: str, *, prompt_opened_think: bool = False, problem: str | None = None) -> Grade:
    """`grade` without blocking the event loop.

    Raises:
        CheckerError: as in `grade`.
    """
    if len(response) > 50_000:
        parsed = await asyncio.to_thread(parse_answer, response, prompt_opened_think=prompt_opened_think)
    else:
        parsed = parse_answer(response, prompt_opened_think=prompt_opened_think)
    decided = _decide(parsed, answer, problem)
    if not isinstance(decided, Equivalence):
        return decided
    try:
        return _finish(parsed, await equivalent_async(decided))
    except CheckerTimeout:
        return Grade(0.0, "timeout", parsed.text, parsed.last_line)


async def read_by_checker(answer: str) -> bool:
    """Whether the known `answer` is more than text: a number, words, or what math-verify reads as mathematics.

    Raises:
        CheckerError: as in `grade`.
    """
    number, gold = _gold(answer)
    if number or _WORDS.fullmatch(gold):
        return True
    try:
        return await reads_async(answer)
    except CheckerTimeout:
        return False


def _finish(parsed: ParsedAnswer, equal: bool) -> Grade:
    return Grade(float(equal), "correct" if equal else "wrong", parsed.text, parsed.last_line)


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[ExactNumber | None, str]:
    """The known answer as an exact number, if it is one, and as cleaned text."""
    text = answer
    boxed = parse_answer(answer)
    if boxed.source == "box" and boxed.text is not None:
        text = boxed.text
    return read_exact(text), clean(text)


def _decide(parsed: ParsedAnswer, answer: str, problem: str | None) -> Grade | Equivalence:
    """The verdict where it needs no algebra, else the question for the checker."""
    text = parsed.text
    if text is None or parsed.problem:
        verdict: Verdict = "wrong" if parsed.problem == "hedge" else parsed.problem or "no_answer"
        return Grade(0.0, verdict, text, parsed.last_line)
    number, gold = _gold(answer)
    if not gold:
        return _finish(parsed, False)
    if len(text) > _MAX_SYMBOLIC:
        return _finish(parsed, text == answer.strip())
    given = clean(text)
    if given == gold:
        return _finish(parsed, True)
    theirs = read_exact(text)
    if number and theirs:
        return _finish(parsed, number.equals(theirs))
    if number and not _ARITHMETIC.fullmatch(given):
        # An answer to a number is a number or arithmetic; a restated problem, a list or an inequality is not.
        return _finish(parsed, False)
    if number and _DATE.fullmatch(given):
        return _finish(parsed, False)
    if _WORDS.fullmatch(gold):
        # Names and letters are compared as text: "(B) 12" names choice B, "Monday" is not Tuesday.
        choice = re.match(r"\(?([A-Z])\)(?:\s|$)", given)
        same = given.casefold() == gold.casefold() and (len(gold) > 1 or given == gold)
        return _finish(parsed, same or bool(len(gold) == 1 and choice and choice.group(1) == gold))
    if problem is not None and restates(given, gold, problem, exactly=number is None):
        return _finish(parsed, False)
    if certainly_differ(gold, given):
        return _finish(parsed, False)
    return Equivalence(gold=answer if number is None else gold, given=text)
