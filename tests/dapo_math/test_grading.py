import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
from dapo_math import CheckerError, agrade, extract, grade, parse_answer, pool
from dapo_math.problems import PROMPTS
from hypothesis import given, settings
from hypothesis import strategies as st
from pebble import ProcessExpired

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "answer_cases.jsonl").read_text().splitlines()]
CERTAIN = [case for case in CASES if case["certainty"] == "high"]


@pytest.mark.parametrize("case", CERTAIN, ids=[case["id"] for case in CERTAIN])
def test_a_case_that_no_reader_would_dispute_gets_its_reward(case: dict[str, str]):
    assert grade(case["response"], case["gold"]).reward == case["expected"]


def boxed(text: str) -> str:
    return f"So the final answer is \\boxed{{{text}}}."


SYMBOLIC, ROOT = "\\boxed{\\sqrt{8}}", "2\\sqrt{2}"


def spellings(n: int) -> list[str]:
    zero_padded, grouped = f"{'-' * (n < 0)}0{abs(n)}", f"{n:,}"
    return [
        f"{n}", f" {n} ", f"${n}$", f"{n}.", f"{n}.0", f"{n}.00", zero_padded, grouped, grouped.replace(",", "{,}"),
        grouped.replace(",", "\\,"), f"\\text{{{n}}}", f"\\mathbf{{{n}}}", f"{{{n}}}", f"x = {n}", f"n={n}",
        f"{n}\\text{{ cm}}", f"{n} \\text{{ miles per hour}}", f"{n} cm", f"{n}^\\circ", f"{n}^{{\\circ}}", f"\\${n}",
        f"\\frac{{{2 * n}}}{{2}}", f"{n}/1", f"\\boxed{{{n}}}", str(n).replace("-", "−"),
    ]  # fmt: skip


integers = st.integers(-(10**12), 10**12)


@settings(deadline=None)
@given(integers)
def test_an_integer_is_accepted_in_each_of_its_usual_spellings(n: int):
    for text in spellings(n):
        assert grade(boxed(text), str(n)).verdict == "correct", text


@settings(deadline=None)
@given(integers, integers)
def test_no_other_integer_is_ever_accepted_in_any_spelling(n: int, other: int):
    if n != other:
        for text in spellings(other):
            assert grade(boxed(text), str(n)).reward == 0, text


@settings(deadline=None)
@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_rationals_compare_exactly(one, two):
    text = f"\\frac{{{two.numerator}}}{{{two.denominator}}}"
    assert grade(boxed(text), f"{one.numerator}/{one.denominator}").reward == float(one == two)


@settings(deadline=None, max_examples=300)
@given(st.text(st.sampled_from("\\{}boxed<think>/ 034$,;andor\n:Answer^!"), max_size=80))
def test_no_text_raises_or_hangs(text: str):
    start = time.monotonic()
    assert grade(text, "34").reward in (0.0, 1.0)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("response", "verdict", "parsed"),
    [
        ("\\boxed{5}, no: \\boxed{34}", "correct", "34"),
        ("\\boxed{34} and \\boxed{35}", "wrong", "35"),
        ("\\boxed{35} or \\boxed{34}", "wrong", "34"),
        ("\\boxed{34} and \\boxed{34}", "correct", "34"),
        ("\\boxed{34", "unterminated", None),
        ("\\boxed{34}. Wait: \\boxed{3", "unterminated", None),
        ("\\boxed{\\boxed{34}}", "correct", "\\boxed{34}"),
        ("\\boxed{\\text{34}}", "correct", "\\text{34}"),
        ("nothing", "no_answer", None),
        ("", "no_answer", None),
        ("<think>\\boxed{34}", "unfinished_think", None),
        ("<think>\\boxed{34}</think> hm", "no_answer", None),
        ("<think>\\boxed{35}</think> \\boxed{34}", "correct", "34"),
        ("a</think>\\boxed{34}<think>", "unfinished_think", None),
        ("**Answer:** 34", "correct", "34"),
        ("Answer: $34$.", "correct", "34"),
        ("Answer: 12\nAnswer: **34**", "correct", "34"),
        ("Answer: 34\n\\boxed{35}", "wrong", "35"),
        ("Answer:", "no_answer", None),
    ],
)
def test_the_answer_is_found_where_the_rules_say(response: str, verdict: str, parsed: str | None):
    result = grade(response, "34")
    assert (result.verdict, result.parsed) == (verdict, parsed)


def test_a_prompt_that_opened_the_thought_makes_an_unclosed_reply_unfinished():
    assert grade("\\boxed{34}", "34", prompt_opened_think=True).verdict == "unfinished_think"
    assert grade("so</think>\\boxed{34}", "34", prompt_opened_think=True).verdict == "correct"


pieces = st.lists(st.sampled_from(["\\", "\\\\", "{", "}", "\\boxed{", "\\fbox {", "boxed", "3", " and "]), max_size=14)


@settings(deadline=None, max_examples=500)
@given(pieces, pieces)
def test_what_stands_before_the_first_box_decides_nothing(before: list[str], rest: list[str]):
    text = "".join(before + rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "_first_box", lambda text: 0)
        expected = parse_answer(text)
    assert parse_answer(text) == expected


def test_the_last_line_is_told_apart():
    assert parse_answer("x\n\\boxed{3}.").last_line
    assert not parse_answer("\\boxed{3}\nmore").last_line


HOSTILE = ["9^{9^{9^{9}}}", "(10^9)!", "9!!!!", "2^{2^{2^{2^{2^{2}}}}}", "\\sqrt{" * 3000 + "}" * 3000, "9" * 100_000]
HOSTILE += ["{" * 400_000 + "}" * 400_000, "{" * 8000 + "}" * 8000, "(" * 9000 + "1" + ")" * 9000]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
@pytest.mark.parametrize("gold", ["34", "\\frac{\\pi}{2}"])
def test_a_hostile_answer_scores_zero_within_five_seconds(text: str, gold: str):
    start = time.monotonic()
    result = grade(boxed(text), gold)
    assert result.reward == 0 and result.verdict in ("wrong", "timeout")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "}", "\\boxed{1}", "<think>", "Answer: 3\n", "\\", "a1 ", "\x00\ud800"]
)
def test_a_megabyte_of_anything_is_graded_within_five_seconds(unit: str):
    text = unit * (10**6 // len(unit))
    start = time.monotonic()
    assert grade(text, "34").reward == 0
    assert time.monotonic() - start < 5


def test_right_answers_are_graded_while_a_hostile_one_is_killed():
    async def scenario() -> None:
        await agrade(SYMBOLIC, ROOT)  # the workers start before the clock does
        hostile = asyncio.create_task(agrade(boxed("9^{9^{9^{9}}}"), "34"))
        await asyncio.sleep(0.1)
        good = await asyncio.gather(*(agrade(boxed("\\frac{1}{\\sqrt{2}}"), "\\frac{\\sqrt{2}}{2}") for _ in range(20)))
        assert all(result.verdict == "correct" for result in good)
        assert not hostile.done(), "they waited for it"
        assert (await hostile).verdict == "timeout"

    asyncio.run(scenario())


def children(of: int) -> list[psutil.Process]:
    return psutil.Process(of).children(recursive=True)


def test_a_right_answer_whose_worker_is_killed_from_outside_is_still_right():
    assert grade(SYMBOLIC, ROOT).verdict == "correct"
    me = os.getpid()
    # Other tests' servers are children of this process too, and not to be touched.
    ours = [p for p in children(me) if "forkserver" in " ".join(p.cmdline())]
    for victims in ([p for p in ours if p.ppid() != me], [p for p in ours if p.ppid() == me]):
        assert victims
        slow = f"\\boxed{{{'+'.join(['x'] * 200)}}}"
        results: list[Any] = []
        thread = threading.Thread(target=lambda found=results, text=slow: found.append(grade(text, "200x+0")))
        thread.start()
        time.sleep(0.05)
        for process in victims:
            process.kill()
        thread.join(30)
        assert [result.verdict for result in results] == ["correct"]
        assert grade(SYMBOLIC, ROOT).verdict == "correct"


def test_workers_that_are_lost_every_time_are_a_fault_and_no_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    def lost(*_: object) -> Any:
        future: Future[bool] = Future()
        future.set_exception(ProcessExpired("gone", code=-9))
        return future

    monkeypatch.setattr(pool, "_ask", lost)
    with pytest.raises(CheckerError):
        grade(SYMBOLIC, ROOT)
    with pytest.raises(CheckerError):
        asyncio.run(agrade(SYMBOLIC, ROOT))


def test_a_worker_that_the_answer_itself_crashed_is_a_timeout(monkeypatch: pytest.MonkeyPatch):
    def crashed(*_: object) -> Any:
        future: Future[bool] = Future()
        future.set_exception(ProcessExpired("aborted", code=-6))
        return future

    monkeypatch.setattr(pool, "_ask", crashed)
    assert grade(SYMBOLIC, ROOT).verdict == "timeout"


def test_an_answer_that_no_worker_was_free_for_is_a_fault_and_no_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "QUEUE_SECONDS", 0.5)
    hostile = boxed("9^{9^{9^{9}}}")

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(agrade(hostile, "34") for _ in range(pool.WORKERS + 2)), return_exceptions=True)

    assert any(isinstance(result, CheckerError) for result in asyncio.run(scenario()))
    with pytest.raises(CheckerError, match="no worker was free"):
        grade(hostile, "34")
    monkeypatch.undo()
    assert grade(SYMBOLIC, ROOT).verdict == "correct"


def test_a_forked_child_grades_and_so_does_its_parent_afterwards():
    code = (
        "import os, dapo_math\n"
        "def verdict(): return dapo_math.grade('\\\\boxed{\\\\sqrt{8}}', '2\\\\sqrt{2}').verdict\n"
        "print(verdict(), flush=True)\n"
        "child = os.fork()\n"
        "print(verdict(), flush=True)\n"
        "if child: os.waitpid(child, 0); print(verdict(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["correct"] * 4, done.stderr


def test_infinities_compare_without_a_fault():
    for given_, gold, verdict in (
        ("+\\infty", "\\infty", "correct"),
        ("-\\infty", "\\infty", "wrong"),
        ("0/0", "0/0", "correct"),
    ):
        assert grade(boxed(given_), gold).verdict == verdict


@pytest.mark.parametrize("text", ["2024-01-05", "2024-1-5", "2024/01/05", "05-01-2024", "1/5/2024", "2020-02"])
def test_a_date_is_no_subtraction_and_no_division(text: str):
    value = eval("Fraction(1)*" + re.sub(r"\b0+(?=\d)", "", text), {"Fraction": Fraction})
    assert grade(boxed(text), str(value)).reward == 0


@pytest.mark.parametrize("text", ["12 + 34", "12+34", "34 + 12", "12 + 34 + 0", "50 - 4", "23 \\cdot 2", "12 + 34 = ?"])
def test_a_problem_that_asks_for_a_value_is_answered_by_a_number_alone(text: str):
    problem = "12 + 34 = ?\n\nReason step by step, and put your final answer within \\boxed{}."
    assert grade(boxed(text), "46", problem=problem).reward == 0
    assert grade(boxed("46"), "46", problem=problem).reward == 1


RESTATED = [
    ("Compute $\\sqrt{36+64}-\\sqrt{25-16}$.", "7", "\\sqrt{36 + 64} - \\sqrt{25 - 16}", "10-3"),
    ("Simplify $\\sqrt{242}$.", "11\\sqrt2", "\\sqrt{242}", "11\\sqrt{2}"),
    ("Simplify $\\sqrt{242}$.", "11\\sqrt2", "Simplify $\\sqrt{242}$.", "\\sqrt{121 \\cdot 2}"),
    ("Factor the expression $ab+5b+2a+10$.", "(a+5)(b+2)", "ab+5b+2a+10", "(b+2)(a+5)"),
    ("Which is larger, $x^2$ or $x$, for $x>1$?", "x^2", "x", "x^{2}"),
]


@pytest.mark.parametrize(("problem", "gold", "repeated", "solved"), RESTATED)
def test_an_answer_that_repeats_the_problem_earns_nothing(problem: str, gold: str, repeated: str, solved: str):
    for prompt in (problem, PROMPTS["boxed"].format(problem=problem), PROMPTS["answer_line"].format(problem=problem)):
        assert grade(boxed(repeated), gold, problem=prompt).reward == 0
        assert grade(boxed(solved), gold, problem=prompt).reward == 1


def test_grading_works_off_the_main_thread():
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(grade(boxed("\\sqrt{8}"), "2\\sqrt{2}").verdict))
    thread.start()
    thread.join(30)
    assert results == ["correct"]


def test_no_worker_outlives_a_killed_parent():
    graded = "dapo_math.grade('\\\\boxed{\\\\sqrt{8}}', '2\\\\sqrt{2}').verdict"
    code = f"import dapo_math, time; print({graded}, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout and parent.stdout.readline().strip() == "correct"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert workers
    os.kill(parent.pid, 9)
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


STUCK = """
import dapo_math, os, threading, time
dapo_math.grade('\\\\boxed{\\\\sqrt{8}}', '2\\\\sqrt{2}')
dapo_math.pool.DEADLINE_SECONDS = 60
threading.Thread(target=dapo_math.grade, args=('\\\\boxed{9^{9^{9^{9}}}}', '34'), daemon=True).start()
time.sleep(0.5)
child = os.fork() if FORKED else 1
print(child, flush=True) if child else None
time.sleep(30)
"""


@pytest.mark.parametrize("forked", [False, True])
def test_a_worker_stuck_in_an_answer_ends_with_its_killed_parent_even_if_a_forked_child_lives_on(forked: bool):
    code = STUCK.replace("FORKED", str(forked))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    workers = [process for process in children(parent.pid) if "forkserver" in str(process.cmdline())]
    try:
        assert len(workers) == 1 + pool.WORKERS
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        for process in [process for process in workers if process.is_running()]:
            process.kill()
        if forked:
            os.kill(child, 9)


def test_a_worker_does_not_import_the_callers_main_module(tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        "print('imported', flush=True)\n"
        "import dapo_math\n"
        "if __name__ == '__main__':\n"
        "    print(dapo_math.grade('\\\\boxed{\\\\sqrt{8}}', '2\\\\sqrt{2}').verdict, flush=True)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["imported", "correct"]
