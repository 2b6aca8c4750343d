"""Verdicts per second on one core: dapo_math against Verifiers' own checker and plain math-verify, in the same run.

python benchmarks/grading.py [--seconds S] [--save]: prints a table, and one JSON object as the last line.

Three kinds of response, half of them right: 3 kB that ends with a boxed integer (GSM8K's answers), 3 kB with a boxed
MATH-500 answer, and 100 kB with a boxed integer. Verifiers' checker takes seconds for some answers at times, so each
checker works through as many responses as it can in its share of time, at least a whole pass for MATH-500.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator

from dapo_math import grade
from dapo_math.problems import SelectionConfig, select_problems
from math_verify import parse, verify
from record import record
from verifiers.v1.utils.score import verify_boxed_math_answer

Checker = Callable[[str, str], float]
Case = tuple[str, str, bool]
"""Response, known answer, whether it is right."""

PACKAGES = ("dapo-math", "verifiers", "math-verify", "sympy", "pebble")


def ours(response: str, answer: str) -> float:
    return grade(response, answer).reward


def plain_math_verify(response: str, answer: str) -> float:
    """What a user writes from math-verify's README, with both sides boxed."""
    return float(verify(parse(f"\\boxed{{{answer}}}"), parse(response)))


CHECKERS: dict[str, Checker] = {
    "dapo_math": ours,
    "verifiers": verify_boxed_math_answer,
    "math_verify": plain_math_verify,
}


def cases(dataset: str, size: int) -> list[Case]:
    """Responses of `size` characters; every other one gives the next problem's answer, where that differs."""
    answers = [problem.answer for problem in select_problems(dataset, SelectionConfig())[0]]
    reasoning = ("We add $a_1 + a_2$, divide by 2 and look at the remainder; this leaves fewer cases. " * (size // 80))[
        :size
    ]
    made = []
    for index, answer in enumerate(answers):
        given = answers[(index + 1) % len(answers)] if index % 2 else answer
        made.append((f"{reasoning}\nThe answer is $\\boxed{{{given}}}$.", answer, given == answer))
    return made


def rate(checker: Checker, given: list[Case], seconds: float, whole_pass: bool) -> tuple[float, float]:
    """Verdicts per second, and the share of verdicts that are as expected."""
    right = count = 0
    endless: Iterator[Case] = itertools.cycle(given)
    checker(r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}")
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or (whole_pass and count < len(given)):
        response, answer, expected = next(endless)
        right += (checker(response, answer) == 1.0) == expected
        count += 1
    return count / elapsed, right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each checker and kind (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results as well")
    args = parser.parse_args()
    # One core for this process and the checking processes that it starts.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kinds = {"integer": ("gsm8k", 3_000), "math500": ("math500", 3_000), "long": ("gsm8k", 100_000)}
    result: dict[str, float] = {}
    print(f"{'kind':10}{'checker':14}{'verdicts/s':>12}{'as expected':>13}{'ours / theirs':>15}")
    for kind, (dataset, size) in kinds.items():
        given = cases(dataset, size)
        for name, checker in CHECKERS.items():
            per_second, right = rate(checker, given, args.seconds, kind == "math500")
            if name == "dapo_math":
                result |= {f"{kind}_per_s": round(per_second, 1), f"{kind}_as_expected": round(right, 4)}
            else:
                result |= {f"{kind}_{name}_per_s": round(per_second, 1), f"{kind}_{name}_as_expected": round(right, 4)}
                result[f"{kind}_vs_{name}"] = round(result[f"{kind}_per_s"] / per_second, 2)
            ratio = result[f"{kind}_per_s"] / per_second
            print(f"{kind:10}{name:14}{per_second:12,.0f}{right:13.1%}{ratio:15,.1f}")
    record("grading", result, PACKAGES, args.save)


if __name__ == "__main__":
    main()
