"""Checks a set of problems before anything trains on it: each known answer verifies, and no problem answers itself."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo_math.grading import CheckerError, agrade, read_by_checker
from dapo_math.sources import Conflict, Problem

# A fraction that only the checking processes can tell to be equal, so a right grade proves that they work here.
_KNOWN = (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}")
_AT_ONCE = 8

Form = Literal["box", "line"]
_FORMS: dict[Form, str] = {"box": "\\boxed{%s}", "line": "Answer: %s"}


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
    """Check every problem, in either way of giving an answer; `progress` is called after each.

    Raises:
        CheckerError: the checking processes do not work here.
    """
    await prove_checker()
    failed: list[Finding] = []
    literal: list[Finding] = []
    for id, count in Counter(problem.id for problem in problems).items():
        if count > 1:
            failed.append(Finding(id, f"{count} different problems have this id"))

    async def work(pending: list[Problem]) -> None:
        while pending:
            problem = pending.pop()
            if fault := await find_fault(problem.text, problem.text, problem.answer):
                failed.append(Finding(problem.id, fault))
            elif not await read_by_checker(problem.answer):
                literal.append(Finding(problem.id, problem.answer))
            progress()

    pending = problems[::-1]
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work(pending))
    return Report(len(problems), failed, conflicts, literal)


async def prove_checker() -> None:
    """Grade an answer that is known to be right.

    Raises:
        CheckerError: it is not graded correct, so the checking processes do not work here.
    """
    known = await agrade(*_KNOWN)
    if known.verdict != "correct":
        raise CheckerError(f"the checking processes grade a right answer {known.verdict}; is the machine overloaded?")


async def find_fault(question: str, prompt: str, answer: str, forms: Sequence[Form] = ("box", "line")) -> str | None:
    """Why a problem must not be trained on, or None.

    Args:
        question: the problem without any instruction.
        prompt: all that is asked, as the grader gets it.
        answer: the known answer.
        forms: how the prompt lets an answer be given.

    Raises:
        CheckerError: as in `agrade`.
    """
    for form in forms:
        response = _FORMS[form] % answer
        result = await agrade(response, answer, problem=prompt)
        if result.reward != 1.0:
            return f"its own answer, given as {response!r}, is graded {result.verdict}"
    repeated = question.removesuffix("?").strip().removesuffix("=").strip()
    if repeated != answer and (await agrade(f"\\boxed{{{repeated}}}", answer, problem=prompt)).reward:
        return "repeating the problem as its answer is graded correct"
    return None
