"""Checks a set of problems before anything trains on it: each known answer verifies, and no problem answers itself."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dapo_math.grading import CheckerError, agrade, read_by_checker
from dapo_math.sources import Conflict, Problem

# A fraction that only the checking processes can tell to be equal, so a right grade proves that they work here.
_KNOWN = (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}")
_AT_ONCE = 8


@dataclass(frozen=True)
class Finding:
    """What is wrong with one problem."""

    id: str
    fault: str


@dataclass(frozen=True)
class Report:
    """Args:
    problems: how many were checked.
    failed: problems that must not be trained on.
    conflicts: problems that were left out, for their rows give different answers.
    literal: problems whose known answer the checker cannot read, so that only the same text is accepted.
    """

    problems: int
    failed: list[Finding]
    conflicts: list[Conflict]
    literal: list[Finding]


async def check_problems(
    problems: list[Problem], conflicts: list[Conflict], progress: Callable[[], None] = lambda: None
) -> Report:
    """Check every problem; `progress` is called after each.

    Raises:
        CheckerError: the checking processes do not work here.
    """
    known = await agrade(*_KNOWN)
    if known.verdict != "correct":
        raise CheckerError(f"the checking processes grade a right answer {known.verdict}; is the machine overloaded?")
    failed: list[Finding] = []
    literal: list[Finding] = []
    for id, count in Counter(problem.id for problem in problems).items():
        if count > 1:
            failed.append(Finding(id, f"{count} different problems have this id"))

    async def work(pending: list[Problem]) -> None:
        while pending:
            problem = pending.pop()
            if fault := await _fault(problem):
                failed.append(Finding(problem.id, fault))
            elif not await read_by_checker(problem.answer):
                literal.append(Finding(problem.id, problem.answer))
            progress()

    pending = problems[::-1]
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work(pending))
    return Report(len(problems), failed, conflicts, literal)


async def _fault(problem: Problem) -> str | None:
    for form in ("\\boxed{%s}", "Answer: %s"):
        response = form % problem.answer
        result = await agrade(response, problem.answer, problem=problem.text)
        if result.reward != 1.0:
            return f"its own answer, given as {response!r}, is graded {result.verdict}"
    question = problem.text.removesuffix("?").strip().removesuffix("=").strip()
    if question != problem.answer and (
        (await agrade(f"\\boxed{{{question}}}", problem.answer, problem=problem.text)).reward
    ):
        return "repeating the problem as its answer is graded correct"
    return None
