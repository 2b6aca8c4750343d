"""Which problems an environment asks, and how: the settings that every Verifiers version shares, without Verifiers."""

from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig

from dapo_math.arithmetic import ArithmeticConfig, arithmetic_problems
from dapo_math.sources import Columns, Problem, read_problems

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


class ProblemsConfig(BaseConfig):
    """Which problems, and how they are asked."""

    dataset: str = "gsm8k"
    """`arithmetic`, `gsm8k`, `math500`, `aime24`, `aime25`, `amc23` (in the package), `dapo-17k`,
    `dapo-17k-processed`, `dapo-17k-filtered` (from the hub), or a path to a .jsonl or .parquet file."""
    split: Literal["train", "test"] = "train"
    """`arithmetic` holds out test problems; the other sets have one split, whatever this says."""
    prompt_style: Literal["boxed", "answer_line", "plain"] = "boxed"
    """How the final answer is asked for; `plain` gives the problem alone."""
    instruction: str | None = None
    """System prompt of every task."""
    language: Literal["all", "en", "cn"] = "all"
    """Language of `dapo-17k-processed`."""
    problem_column: str | None = None
    """Column of a local file that holds the problem; unset, the usual names are tried."""
    answer_column: str | None = None
    """Column of a local file that holds the answer."""
    id_column: str | None = None
    """Column of a local file that holds a durable id."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many problems, the first of the set's order."""
    seed: int = 0
    """Makes and splits `arithmetic`."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()


def load_problems(config: ProblemsConfig) -> list[Problem]:
    """The problems that `config` selects, before its `limit`.

    Raises:
        ValueError: the set cannot be read; the message names the file, the row and the fault.
    """
    if config.dataset == "arithmetic":
        return arithmetic_problems(config.arithmetic, config.split, config.seed)
    columns = Columns(config.problem_column, config.answer_column, config.id_column)
    return read_problems(config.dataset, columns, config.language)


def ask(problem: Problem, config: ProblemsConfig) -> str:
    """The user's message for `problem`."""
    return PROMPTS[config.prompt_style].format(problem=problem.text)
