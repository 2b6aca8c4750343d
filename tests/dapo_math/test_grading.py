import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from dapo_math import agrade, grade, parse_answer
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "answer_cases.jsonl").read_text().splitlines()]
CERTAIN = [case for case in CASES if case["certainty"] == "high"]


@pytest.mark.parametrize("case", CERTAIN, ids=[case["id"] for case in CERTAIN])
def test_a_case_that_no_reader_would_dispute_gets_its_reward(case: dict[str, str]):
    assert grade(case["response"], case["gold"]).reward == case["expected"]


def boxed(text: str) -> str:
    return f"So the final answer is \\boxed{{{text}}}."


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


def test_the_last_line_is_told_apart():
    assert parse_answer("x\n\\boxed{3}.").last_line
    assert not parse_answer("\\boxed{3}\nmore").last_line


HOSTILE = ["9^{9^{9^{9}}}", "(10^9)!", "9!!!!", "2^{2^{2^{2^{2^{2}}}}}", "\\sqrt{" * 3000 + "}" * 3000, "9" * 100_000]


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
        hostile = asyncio.create_task(agrade(boxed("9^{9^{9^{9}}}"), "34"))
        good = await asyncio.gather(*(agrade(boxed("\\frac{1}{\\sqrt{2}}"), "\\frac{\\sqrt{2}}{2}") for _ in range(20)))
        assert all(result.verdict == "correct" for result in good)
        assert (await hostile).verdict == "timeout"

    asyncio.run(scenario())


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
