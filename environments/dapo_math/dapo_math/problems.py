"""Which problems an environment asks, and how: the settings that every Verifiers version shares, without Verifiers."""

import random
from collections import Counter
from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig

from dapo_math.arithmetic import ArithmeticConfig, arithmetic_problems
from dapo_math.sources import Columns, Conflict, Problem, read_with_conflicts

PROMPTS = {
    "boxed": "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}.",
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    "plain": "{problem}",
}
"""`answer_line` is the wording of the DAPO-Math data set."""


class SelectionConfig(BaseConfig):
    """Which problems of a set, and in which order."""

    split: Literal["train", "test"] = "train"
    """`arithmetic` holds out test problems; the other sets have one split, whatever this says."""
    language: Literal["all", "en", "cn"] = "all"
    """Language of `dapo-17k-processed`."""
    revision: str | None = None
    """Commit of a hub set; unset, the one that the README names, whose number of rows is checked."""
    problem_column: str | None = None
    """Column of a local file that holds the problem; unset, the usual names are tried."""
    answer_column: str | None = None
    """Column of a local file that holds the answer."""
    id_column: str | None = None
    """Column of a local file that holds a durable id."""
    level_column: str | None = None
    """Column of a local file that holds the level, a whole number; unset, `level`."""
    levels: list[int] | None = None
    """Problems of these levels alone, such as `[4, 5]`, for sets that have levels."""
    subjects: list[str] | None = None
    """Problems of these subjects alone, such as `["Algebra"]`, for sets that name them."""
    drop_ids: list[str] = []
    """Problems to leave out, by id, such as those that the check of a set names."""
    shuffle: bool = False
    """Shuffle by `seed`, before `limit`; unset, the order is the set's own."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many problems, the first of the order."""
    seed: int = 0
    """Shuffles; makes and splits `arithmetic`."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class ProblemsConfig(SelectionConfig):
    """Which problems, and how they are asked."""

    dataset: str = "gsm8k"
    """`arithmetic`, `gsm8k`, `math500`, `aime24`, `aime25`, `amc23` (in the package), `dapo-17k`,
    `dapo-17k-processed`, `dapo-17k-filtered`, `gsm8k-train`, `gsm8k-test`, `math500-levels` (from the hub), or a path
    to a .jsonl or .parquet file."""
    prompt_style: Literal["boxed", "answer_line", "plain"] = "boxed"
    """How the final answer is asked for; `plain` gives the problem alone."""
    instruction: str | None = None
    """System prompt of every task, as text."""


def select_problems(dataset: str, config: SelectionConfig) -> tuple[list[Problem], list[Conflict]]:
    """The problems of `dataset` that `config` selects, and those left out for their conflicting answers.

    Raises:
        ValueError: the set cannot be read, has no levels or subjects to select by, or nothing is left.
    """
    if dataset == "arithmetic":
        problems, conflicts = arithmetic_problems(config.arithmetic, config.split, config.seed), []
        if config.revision or config.drop_ids:
            raise ValueError("dataset 'arithmetic' is made, not read: it has no revision and no ids to drop")
    else:
        columns = Columns(config.problem_column, config.answer_column, config.id_column, config.level_column)
        problems, conflicts = read_with_conflicts(dataset, columns, config.language, config.revision, config.drop_ids)
    for setting, field, wanted in (("levels", "level", config.levels), ("subjects", "subject", config.subjects)):
        if wanted is None:
            continue
        found = {value for problem in problems if (value := getattr(problem, field)) is not None}
        if not found:
            other = "; dataset 'math500-levels', from the hub, has them" if dataset == "math500" else ""
            raise ValueError(f"{setting} = {wanted}: dataset {dataset!r} has no {setting}{other}")
        problems = [problem for problem in problems if getattr(problem, field) in wanted]
        if not problems:
            raise ValueError(f"{setting} = {wanted} leaves no problem of {dataset!r}, which has {sorted(found)}")
    if config.shuffle:
        random.Random(config.seed).shuffle(problems)
    return problems[: config.limit], conflicts


def load_problems(config: ProblemsConfig) -> list[Problem]:
    """The problems that `config` selects.

    Raises:
        ValueError: as in `select_problems`, or two problems have one id.
    """
    problems, _ = select_problems(config.dataset, config)
    twice = [id for id, count in Counter(problem.id for problem in problems).items() if count > 1]
    if twice:
        raise ValueError(f"dataset {config.dataset!r}: several problems have the id {twice[0]!r}; set id_column")
    return problems


def ask(problem: Problem, config: ProblemsConfig) -> str:
    """The user's message for `problem`."""
    return PROMPTS[config.prompt_style].format(problem=problem.text)


def asked(prompt: str, prompt_style: str) -> str:
    """The problem in a message that `ask` made."""
    head, tail = PROMPTS[prompt_style].format(problem="\0").split("\0")
    return prompt.removeprefix(head).removesuffix(tail)
