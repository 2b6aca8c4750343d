"""Sets as they are published: small files with the same columns, read through the same code as the hub's."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dapo_math.hub import HUB
from dapo_math.problems import ProblemsConfig, SelectionConfig, load_problems, select_problems
from dapo_math.sources import Columns, read_problems

PUBLISHED = Path(__file__).parent / "data" / "published"
FILES = {"gsm8k-train": "gsm8k", "gsm8k-test": "gsm8k"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for; the files stand in for it, and their numbers of rows for the published ones."""
    calls: list[dict[str, Any]] = []
    load = datasets.load_dataset
    by_id: dict[tuple[str, str], str] = {}
    for name, hub_set in HUB.items():
        path = PUBLISHED / f"{FILES.get(name, name)}.jsonl"
        by_id[hub_set.id, hub_set.split] = str(path)
        rows = dict.fromkeys(hub_set.rows, len(path.read_text().splitlines()))
        monkeypatch.setitem(HUB, name, dataclasses.replace(hub_set, rows=rows))

    def load_dataset(id: str, name: str | None, *, split: str, revision: str | None) -> Any:
        calls.append({"id": id, "name": name, "split": split, "revision": revision})
        return load("json", data_files=by_id[id, split], split="train")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize("name", HUB)
def test_each_set_of_the_hub_is_asked_for_at_its_revision_and_read(name: str, asked: list[dict[str, Any]]):
    hub_set = HUB[name]
    problems = load_problems(ProblemsConfig(dataset=name, language="en"))
    (call,) = asked
    configuration = "en" if hub_set.by_language else "main" if "gsm8k" in name else None
    expected = {"id": hub_set.id, "name": configuration, "split": hub_set.split, "revision": hub_set.revision}
    assert call == expected and len(problems) >= 2
    assert not any("Remember to put" in p.text or "Solve the following" in p.text for p in problems)
    assert all(p.source == name and p.answer.lstrip("-").isdigit() for p in problems)


def test_the_raw_set_is_reduced_to_one_row_a_problem_without_those_in_conflict(asked: list[dict[str, Any]]):
    problems, conflicts = select_problems("dapo-17k", SelectionConfig())
    assert [p.answer for p in problems] == ["34", "113", "-3"]
    assert problems[0].id == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    assert problems[0].text.startswith("In triangle $ABC$")
    assert [c.answers for c in conflicts] == [("2", "1")]


@pytest.mark.parametrize("language", ["all", "en", "cn"])
def test_the_processed_set_is_asked_for_in_the_chosen_language(language: Any, asked: list[dict[str, Any]]):
    texts = [p.text for p in load_problems(ProblemsConfig(dataset="dapo-17k-processed", language=language))]
    assert asked[0]["name"] == language and texts[-1] == "求方程 $x^2=2x$ 的非零解。"


def test_published_answers_become_plain_numbers(asked: list[dict[str, Any]]):
    assert [p.answer for p in load_problems(ProblemsConfig(dataset="gsm8k-train"))] == ["1234", "5"]
    for name, answers in (("aime24", ["73", "204"]), ("aime25", ["336", "70"]), ("amc23", ["27", "36"])):
        assert [p.answer for p in read_problems(str(PUBLISHED / f"{name}.jsonl"), Columns())] == answers


def test_a_set_with_another_number_of_rows_than_published_is_refused(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(HUB, "dapo-17k", dataclasses.replace(HUB["dapo-17k"], rows={None: 1_791_700}))
    with pytest.raises(ValueError, match=r"dapo-17k.* has 15 rows, known are 1791700.* the setting revision"):
        load_problems(ProblemsConfig(dataset="dapo-17k"))
    assert len(load_problems(ProblemsConfig(dataset="dapo-17k", revision="main"))) == 3
    assert asked[-1]["revision"] == "main"


def test_a_set_without_a_fixed_revision_says_which_it_read(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    load, commit = datasets.load_dataset, "0123456789abcdef0123456789abcdef01234567"

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        loaded: Any = load(*args, **kwargs)
        loaded.info.download_checksums = {f"hf://datasets/a/b@{commit}/data/train.parquet": {}}
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with caplog.at_level(logging.WARNING, "dapo_math.hub"):
        load_problems(ProblemsConfig(dataset="dapo-17k-filtered"))
        load_problems(ProblemsConfig(dataset="dapo-17k"))
    (record,) = caplog.records
    assert f"set revision = '{commit}'" in record.getMessage()


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"'dapo-17k' \(BytedTsinghua-SIA/DAPO-Math-17k\) cannot be loaded.*offline"):
        load_problems(ProblemsConfig(dataset="dapo-17k"))


def test_a_parquet_file_on_disk_is_read_like_the_hubs(tmp_path: Path):
    rows = datasets.load_dataset("json", data_files=str(PUBLISHED / "dapo-17k.jsonl"), split="train")
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "dapo.parquet")
    assert [p.id for p in read_problems(str(tmp_path / "dapo.parquet"), Columns())] == [
        p.id for p in read_problems(str(PUBLISHED / "dapo-17k.jsonl"), Columns())
    ]


def test_levels_and_subjects_select_problems(asked: list[dict[str, Any]]):
    def ids(**settings: Any) -> list[str]:
        return [p.id for p in load_problems(ProblemsConfig(dataset="math500-levels", **settings))]

    assert ids(levels=[4, 5]) == ["test/precalculus/4.json", "test/number theory/5.json"]
    assert ids(subjects=["Algebra"]) == ["test/algebra/1.json", "test/algebra/3.json"]
    assert ids(subjects=["Algebra"], levels=[3, 4]) == ["test/algebra/3.json"]
    with pytest.raises(ValueError, match=r"levels = \[7\] leaves no problem.*which has \[1, 2, 3, 4, 5\]"):
        ids(levels=[7])
    with pytest.raises(ValueError, match=r"subjects = \['Algebra'\] leaves no problem.*which has \['Geometry'\]"):
        ids(levels=[2], subjects=["Algebra"])


def test_a_set_without_levels_says_so_when_it_is_asked_for_some():
    with pytest.raises(ValueError, match=r"levels = \[5\]: dataset 'math500' has no levels; dataset 'math500-levels'"):
        load_problems(ProblemsConfig(dataset="math500", levels=[5]))
    with pytest.raises(ValueError, match=r"subjects = \['x'\]: dataset 'arithmetic' has no subjects"):
        load_problems(ProblemsConfig(dataset="arithmetic", subjects=["x"]))


def test_a_revision_is_for_sets_of_the_hub_alone():
    for dataset in ("math500", "file.jsonl"):
        with pytest.raises(ValueError, match="revision = 'main' is for sets from the hub"):
            load_problems(ProblemsConfig(dataset=dataset, revision="main"))
    with pytest.raises(ValueError, match="no revision and no ids to drop"):
        load_problems(ProblemsConfig(dataset="arithmetic", drop_ids=["x"]))
