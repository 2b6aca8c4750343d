import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dapo_math import grade
from dapo_math.arithmetic import ArithmeticConfig, arithmetic_problems
from dapo_math.problems import PROMPTS, ProblemsConfig, load_problems
from dapo_math.sources import SHIPPED, Columns, Conflict, read_problems, read_with_conflicts
from hypothesis import given, settings
from hypothesis import strategies as st


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_answer_verifies_against_itself(name: str):
    problems = read_problems(name, Columns())
    assert len(problems) >= 30 and len({problem.id for problem in problems}) == len(problems)
    assert not [p.id for p in problems if grade(f"\\boxed{{{p.answer}}}", p.answer).reward != 1]


operand_sets = st.sets(st.sampled_from("+-*"), min_size=1)


@settings(deadline=None, max_examples=25)
@given(operand_sets, st.integers(-5, 5), st.integers(12, 20), st.integers(2, 3), st.integers(0, 3))
def test_arithmetic_splits_are_disjoint_up_to_order_and_answers_are_right(operations, low, span, terms, seed):
    config = ArithmeticConfig(operations=sorted(operations), low=low, high=low + span, terms=terms, test_size=20)
    train, test = (arithmetic_problems(config, split, seed) for split in ("train", "test"))

    def family(text: str) -> tuple[str, ...]:
        return tuple(sorted(text.removesuffix(" = ?").split(" ")))

    assert len(test) == 20
    assert not {family(p.text) for p in train} & {family(p.text) for p in test}
    assert len({p.text for p in train}) == len(train)
    for problem in [*train[:50], *test]:
        assert int(problem.answer) == eval(problem.text.removesuffix(" = ?").replace("--", "- -"))
    assert arithmetic_problems(config, "test", seed) == test


def test_arithmetic_too_small_to_hold_out_says_so():
    with pytest.raises(ValueError, match="too few to hold out test_size = 256"):
        arithmetic_problems(ArithmeticConfig(high=3), "train", 0)


def test_an_operation_named_twice_gives_no_problem_twice():
    problems = arithmetic_problems(ArithmeticConfig(operations=["+", "+"], high=20, test_size=20), "train", 0)
    assert len({problem.text for problem in problems}) == len(problems)


def test_of_many_problems_a_sample_is_split_and_the_test_side_does_not_depend_on_how_many_are_trained_on():
    sizes = [ArithmeticConfig(high=9999, test_size=50, train_size=size) for size in (100, 1000)]
    small, large = ([p.text for p in arithmetic_problems(config, "train", 0)] for config in sizes)
    assert len(set(small)) == 100 and len(set(large)) == 1000 and set(small) < set(large)
    tests = [arithmetic_problems(config, "test", 0) for config in sizes]
    assert tests[0] == tests[1] and len(tests[0]) == 50


@pytest.mark.parametrize(
    "config",
    [
        ArithmeticConfig(high=400, train_size=300_000),
        ArithmeticConfig(high=4, terms=8, test_size=400),
        ArithmeticConfig(high=4, terms=8, test_size=900, train_size=5_000),
    ],
)
def test_large_splits_end_in_problems_or_in_a_clear_error(config: ArithmeticConfig):
    try:
        assert len(arithmetic_problems(config, "train", 0)) <= config.train_size
    except ValueError as error:
        assert "too few to hold out" in str(error)


PUBLISHED = {
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": [
                {
                    "role": "user",
                    "content": PROMPTS["answer_line"].format(problem="What is 1+1?"),
                }
            ],
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "extra_info": {"index": "uuid-1"},
        },
        ("uuid-1", "What is 1+1?", "2"),
    ),
    "filtered": (
        {"source_prompt": [{"role": "user", "content": "What is 1+1?"}], "ground_truth": "2"},
        ("file/1", "What is 1+1?", "2"),
    ),
    "aime24": ({"problem": "P", "answer": "073", "id": 60}, ("60", "P", "73")),
    "aime25": ({"question": "P", "answer": "336^\\circ"}, ("file/1", "P", "336")),
    "amc23": ({"question": "P", "answer": 27.0}, ("file/1", "P", "27")),
    "gsm8k": ({"question": "P", "answer": "so 1,000\n#### 1,000"}, ("file/1", "P", "1000")),
    "math500": (
        {"problem": "P", "solution": "long", "answer": "\\frac12", "unique_id": "a/1"},
        ("a/1", "P", "\\frac12"),
    ),
    "chinese": ({"problem": "求 1+1 的值。", "answer": "2"}, ("file/1", "求 1+1 的值。", "2")),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_published_schema_is_read(name: str, suffix: str, tmp_path: Path):
    row, expected = PUBLISHED[name]
    path = tmp_path / f"file.{suffix}"
    if suffix == "jsonl":
        jsonl(path, [row])
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (problem,) = read_problems(str(path), Columns())
    assert (problem.id, problem.text, problem.answer) == expected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"problem": "P"}, "no column 'answer' or 'ground_truth' or 'solution' for the answer"),
        ({"answer": "1"}, "no column 'problem'"),
        ({"problem": "", "answer": "1"}, "the problem is empty"),
        ({"problem": "P", "answer": " "}, "the answer is empty"),
        ({"problem": "P\x07", "answer": "1"}, "control character '\\\\x07'"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "answer": "1"}, "found 2"),
        ({"prompt": [], "answer": "1"}, "found 0"),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "answer": "1"},
            "exactly one user message, found 1 among 2",
        ),
        ({"problem": "P\ud800", "answer": "1"}, "control character"),
        ({"problem": 5, "answer": "1"}, "the problem must be text, got int"),
        ({"problem": "P", "answer": {"a": 1}}, "the answer must be text or a number, got dict"),
    ],
)
def test_a_bad_row_is_named_with_its_fault(row: dict[str, Any], fault: str, tmp_path: Path):
    path = jsonl(tmp_path / "file.jsonl", [{"problem": "fine", "answer": "1"}, row])
    with pytest.raises(ValueError, match=rf"file\.jsonl row 2 \(id file/2\): .*{fault}"):
        read_problems(path, Columns())


def test_broken_json_is_named(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"problem": "P", "answer": "1"}\n{"problem"\n')
    with pytest.raises(ValueError, match=r"file\.jsonl row 2: not valid JSON"):
        read_problems(str(path), Columns())


def test_repeated_rows_count_once_and_conflicting_ones_not_at_all(tmp_path: Path):
    rows = [
        {"problem": p, "answer": a} for p, a in [("same", "1"), ("same", "1"), ("two", "1"), ("two", "2"), ("x", "3")]
    ]
    assert [p.text for p in read_problems(jsonl(tmp_path / "f.jsonl", rows), Columns())] == ["same", "x"]


def test_the_left_out_problems_are_known_with_their_answers(tmp_path: Path):
    rows = [{"id": i, "problem": "two", "answer": a} for i, a in enumerate(["1", "2", "1", "3"])]
    rows.append({"id": 9, "problem": "x", "answer": "3"})
    _, conflicts = read_with_conflicts(jsonl(tmp_path / "f.jsonl", rows), Columns())
    assert conflicts == [Conflict("0", ("1", "2", "3"))]


def test_spellings_of_one_number_are_no_conflict(tmp_path: Path):
    answers = ["336", "336^\\circ", "336^{\\circ}", "0336", "336.0", 336, 336.0]
    rows = [{"problem": "P", "answer": answer} for answer in answers]
    assert [p.answer for p in read_problems(jsonl(tmp_path / "f.jsonl", rows), Columns())] == ["336"]


def test_a_missing_id_column_is_named(tmp_path: Path):
    path = jsonl(tmp_path / "file.jsonl", [{"problem": "P", "answer": "1", "id": "k"}])
    with pytest.raises(ValueError, match=r"file\.jsonl row 1: no column 'uuid' for the id"):
        read_problems(path, Columns(id="uuid"))


def test_rows_are_numbered_as_an_editor_numbers_lines(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_text('\n\n{"problem": "P"}\n')
    with pytest.raises(ValueError, match=r"file\.jsonl row 3 .*no column 'answer'"):
        read_problems(str(path), Columns())


@pytest.mark.parametrize(
    ("suffix", "content", "fault"),
    [
        ("jsonl", b"\xff\xfe", "row 1: not valid UTF-8"),
        ("jsonl", b"[" * 100_000, "row 1: not valid JSON"),
        ("jsonl", b"[1]", "row 1: must be a JSON object, got list"),
        ("jsonl", b"\n", "no problems"),
        ("parquet", b"PAR1", "after row 0: not a readable parquet file"),
        ("parquet", b"", "after row 0: not a readable parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_fault(suffix: str, content: bytes, fault: str, tmp_path: Path):
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"file\.{suffix}:? {fault}"):
        read_problems(str(path), Columns())


def test_the_order_is_the_sets_own_until_it_is_shuffled_by_seed():
    def ids(**settings: Any) -> list[str]:
        return [p.id for p in load_problems(ProblemsConfig(dataset="aime24", **settings))]

    assert ids() == ids(seed=1) == [f"aime24/{n}" for n in range(30)]
    shuffled = ids(shuffle=True, seed=1)
    assert shuffled != ids() and sorted(shuffled) == sorted(ids())
    assert ids(shuffle=True, seed=1) == shuffled != ids(shuffle=True, seed=2)
    assert ids(shuffle=True, seed=1, limit=5) == shuffled[:5] and ids(limit=5) == ids()[:5]


def test_a_faulty_row_can_be_dropped_by_its_id(tmp_path: Path):
    rows = [{"id": "a", "problem": "P\x07", "answer": "1"}, {"id": "b", "problem": "Q", "answer": "2"}]
    path = jsonl(tmp_path / "file.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 1 \(id a\): .*control character.*leave it out with drop_ids"):
        load_problems(ProblemsConfig(dataset=path))
    assert [p.id for p in load_problems(ProblemsConfig(dataset=path, drop_ids=["a"]))] == ["b"]
    with pytest.raises(ValueError, match=r"drop_ids names \['c'\], which no row has"):
        load_problems(ProblemsConfig(dataset=path, drop_ids=["a", "c"]))


def test_one_id_for_two_problems_is_refused(tmp_path: Path):
    rows = [{"id": "a", "problem": p, "answer": "1"} for p in ("P", "Q")]
    with pytest.raises(ValueError, match="several problems have the id 'a'; set id_column"):
        load_problems(ProblemsConfig(dataset=jsonl(tmp_path / "file.jsonl", rows)))


@pytest.mark.parametrize(
    ("row", "level"),
    [
        ({"level": 3}, 3),
        ({"level": "3"}, 3),
        ({"level": "Level 3"}, 3),
        ({"level": 3.0}, 3),
        ({"level": "Level ?"}, None),
    ],
)
def test_a_level_is_read_in_each_published_spelling(row: dict[str, Any], level: int | None, tmp_path: Path):
    path = jsonl(tmp_path / "file.jsonl", [{"problem": "P", "answer": "1", "type": "Algebra", **row}])
    (problem,) = read_problems(path, Columns())
    assert (problem.level, problem.subject) == (level, "Algebra")


def test_either_half_of_the_published_instruction_is_taken_off(tmp_path: Path):
    head, tail = PROMPTS["answer_line"].split("{problem}")
    texts = [head + "P" + tail, head + "Q", "R" + tail + "\n"]
    path = jsonl(tmp_path / "f.jsonl", [{"problem": text, "answer": "1"} for text in texts])
    assert [p.text for p in read_problems(path, Columns())] == ["P", "Q", "R"]


def test_columns_can_be_named(tmp_path: Path):
    path = jsonl(tmp_path / "f.jsonl", [{"q": "P", "a": "1", "key": "k", "hardness": 4}])
    (problem,) = read_problems(path, Columns(problem="q", answer="a", id="key", level="hardness"))
    assert (problem.id, problem.text, problem.answer, problem.level) == ("k", "P", "1", 4)
