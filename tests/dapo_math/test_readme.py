"""The package's README says what the code does."""

import re
from pathlib import Path

from dapo_math import grade
from dapo_math.grading import VERDICTS
from dapo_math.hub import HUB
from dapo_math.problems import ProblemsConfig
from dapo_math.sources import SHIPPED

README = (Path(__file__).parents[2] / "environments" / "dapo_math" / "README.md").read_text()


def cells(heading: str, column: int) -> set[str]:
    """The names in code type in one column of the table under a heading."""
    section = README.split(f"### {heading}\n", 1)[1].split("\n### ", 1)[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")][2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


def test_the_arguments_table_lists_every_setting_with_its_default():
    listed = {name.split(".")[0] for name in cells("Environment arguments", 0)}
    assert listed == set(ProblemsConfig.model_fields)
    section = README.split("### Environment arguments\n", 1)[1].split("\n### ", 1)[0]
    for name, field in ProblemsConfig.model_fields.items():
        if isinstance(field.default, str):
            assert f"| `{name}` | `{field.default}` |" in section


def test_the_datasets_table_lists_every_set():
    assert cells("Datasets", 0) >= {"arithmetic", *SHIPPED, *HUB}
    assert all(hub_set.id in README for hub_set in HUB.values())


def test_the_metrics_table_lists_every_metric():
    listed = {("verdict" + name) if name.startswith("/") else name for name in cells("Metrics", 0)}
    assert listed == {f"verdict/{name}" for name in VERDICTS} | {"reward", "correct", "truncated"} | {
        "answer_on_last_line",
        "response_chars",
    }


def test_the_grade_that_the_quickstart_shows_is_the_grade_that_is_given():
    assert r'grade(r"so the answer is \boxed{1{,}034}", "1034")  # Grade(reward=1.0, verdict=' in README
    result = grade(r"so the answer is \boxed{1{,}034}", "1034")
    assert str(result).startswith("Grade(reward=1.0, verdict='correct', parsed='1{,}034'")
