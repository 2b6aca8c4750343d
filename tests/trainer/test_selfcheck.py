"""A run refuses tasks that do not accept their own known answer, or goes on without them when told so."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import verifiers.v1 as vf

from trainer.cli import main
from trainer.errors import UserError
from trainer.selfcheck import checked_tasks


class Data(vf.TaskData):
    fault: str = ""


class Checked(vf.Task[Data]):
    @property
    def key(self) -> str:
        return self.data.id or ""

    async def validate(self, runtime: vf.Runtime) -> bool:
        if self.data.fault == "raises":
            raise ValueError("the known answer is no number")
        return not self.data.fault


class Unchecked(vf.Task[Data]):
    pass


def tasks(*faults: str, kind: type[vf.Task] = Checked) -> list[vf.Task]:
    return [kind(Data(id=f"row-{i}", prompt="?", fault=fault)) for i, fault in enumerate(faults)]  # pyright: ignore


def check(items: list[vf.Task], on_failure) -> list[vf.Task]:
    return asyncio.run(checked_tasks(items, "some-env", on_failure))


def test_tasks_that_pass_are_all_kept_in_order():
    items = tasks(*[""] * 200)
    assert check(items, "stop") == items


def test_a_failing_task_stops_the_run_with_its_id_its_fault_and_the_way_out():
    with pytest.raises(UserError) as error:
        check(tasks("", "refused", "", "raises"), "stop")
    said = str(error.value)
    assert "2 of 4 tasks of 'some-env'" in said
    assert "row-1: its known answer is refused" in said
    assert "row-3: ValueError: the known answer is no number" in said
    assert "--self-check drop" in said


def test_drop_trains_on_the_rest():
    items = tasks("", "refused", "", "raises")
    assert check(items, "drop") == [items[0], items[2]]


def test_off_does_not_check():
    items = tasks("refused", "raises")
    assert check(items, "off") == items


def test_a_set_of_which_nothing_passes_is_refused_even_with_drop():
    with pytest.raises(UserError, match="Nothing is left to train on"):
        check(tasks("refused", "raises"), "drop")


def test_tasks_without_a_check_of_their_own_pass():
    items = tasks("refused", kind=Unchecked)
    assert check(items, "stop") == items


def test_a_long_list_of_failing_tasks_is_cut():
    with pytest.raises(UserError, match="and 40 more"):
        check(tasks("", *["refused"] * 50), "stop")


def test_training_refuses_a_file_whose_known_answers_cannot_be_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"id": "good", "problem": "1 + 1 = ?", "answer": "2"},
        {"id": "hedge", "problem": "What is x?", "answer": r"\boxed{1} or \boxed{2}"},
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "outputs"
    args = ["@", "configs/tiny_cpu.toml", "--taskset.dataset", str(path), "--output-dir", str(output)]
    monkeypatch.setattr(sys, "argv", ["grpo", *args])
    with pytest.raises(SystemExit) as exit_:
        main()
    said = str(exit_.value.code)
    assert "hedge" in said and "--self-check drop" in said
    assert not output.exists(), "a refused run must leave no folder"
