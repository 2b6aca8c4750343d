import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from dapo_math import CheckerError, Grade, __main__, check
from dapo_math.check import check_problems
from dapo_math.sources import SHIPPED, Columns, Conflict, Problem, read_problems


def report(*problems: Problem) -> check.Report:
    return asyncio.run(check_problems(list(problems), []))


def problem(text: str, answer: str, id: str = "p") -> Problem:
    return Problem(id=id, text=text, answer=answer, source="s")


def test_checking_processes_that_grade_a_right_answer_wrong_stop_the_check(monkeypatch: pytest.MonkeyPatch):
    async def slow(*_: object, **__: object) -> Grade:
        return Grade(0.0, "timeout", "x")

    monkeypatch.setattr(check, "agrade", slow)
    with pytest.raises(CheckerError, match="grade a right answer timeout"):
        report(problem("P", "1"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_set_passes(name: str):
    found = report(*read_problems(name, Columns()))
    assert not found.failed and not found.literal


def test_a_problem_that_can_be_answered_by_repeating_it_fails(monkeypatch: pytest.MonkeyPatch):
    assert not report(problem("12 + 34 = ?", "46"), problem("Simplify $\\sqrt{8}$.", "2\\sqrt2", "q")).failed
    agrade = check.agrade
    monkeypatch.setattr(check, "agrade", lambda response, answer, **_: agrade(response, answer))
    (finding,) = report(problem("12 + 34 = ?", "46")).failed
    assert finding.id == "p" and "repeating the problem" in finding.fault


def test_an_answer_that_does_not_verify_against_itself_fails_with_its_id():
    (finding,) = report(problem("P", "}{"), problem("Q", "1", "fine")).failed
    assert finding == check.Finding("p", "its own answer, given as '\\\\boxed{}{}', is graded no_answer")


def test_one_id_for_two_problems_fails():
    (finding,) = report(problem("P", "1"), problem("Q", "2")).failed
    assert (finding.id, finding.fault) == ("p", "2 different problems have this id")


def test_an_answer_that_the_checker_cannot_read_is_listed_and_no_failure():
    found = report(problem("P", "a \\to b"))
    assert not found.failed and [finding.id for finding in found.literal] == ["p"]


def test_progress_counts_every_problem():
    counted: list[None] = []
    asyncio.run(check_problems([problem("P", "1")] * 20, [], lambda: counted.append(None)))
    assert len(counted) == 20


def test_checking_processes_that_do_not_work_stop_the_check(monkeypatch: pytest.MonkeyPatch):
    async def broken(*_: object, **__: object) -> None:
        raise CheckerError("no worker")

    monkeypatch.setattr(check, "agrade", broken)
    with pytest.raises(CheckerError, match="no worker"):
        report(problem("P", "1"))


def test_the_command_lists_what_it_found_by_id_and_says_so_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "set.jsonl"
    rows = [("a", "P", "1"), ("b", "P", "2"), ("c", "Q [x]", "a \\to b"), ("d", "R", "3")]
    path.write_text("".join(json.dumps({"id": i, "problem": p, "answer": a}) + "\n" for i, p, a in rows))
    with pytest.raises(SystemExit) as ended:
        __main__.main(["check", "--dataset", str(path)])
    output = capsys.readouterr().out
    assert ended.value.code == 0 and "2 problems, 0 failed" in output
    assert "left out, different answers: a: 1 | 2" in output and "compared as text alone: c: a \\to b" in output
    with path.open("a") as file:
        file.write(json.dumps({"id": "d", "problem": "another", "answer": "3"}) + "\n")
    with pytest.raises(SystemExit) as ended:
        __main__.main(["check", "--dataset", str(path)])
    assert ended.value.code == 1 and "failed: d: 2 different problems have this id" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["check", "--dataset", "aime25"], 0, "30 problems, 0 failed"),
        (["check", "--dataset", "nope"], 1, "error: dataset 'nope' is neither one of"),
        (["chek"], 1, "error: unknown command 'chek'"),
        ([], 2, "usage: python -m dapo_math check"),
    ],
)
def test_the_command_line_answers_without_a_traceback(arguments: list[str], code: int, says: str):
    command = [sys.executable, "-m", "dapo_math", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_conflicts_are_passed_on():
    conflicts = [Conflict("a", ("1", "2"))]
    assert asyncio.run(check_problems([problem("P", "1")], conflicts)).conflicts == conflicts
