"""The Verifiers v1 taskset: problems as tasks, the checker as their reward."""

from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from dapo_math.arithmetic import ArithmeticConfig, arithmetic_problems
from dapo_math.grading import VERDICTS, agrade
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


class DapoMathConfig(vf.TasksetConfig):
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


class DapoMathData(vf.TaskData):
    """A problem with its known answer."""

    answer: str
    """The known answer."""
    source: str = ""
    """The set it is from."""


class DapoMathTask(vf.Task[DapoMathData]):
    """One problem; reward 1 for a correct final answer."""

    @property
    def key(self) -> str:
        return f"{self.data.source}/{self.data.id}"

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for a correct final answer, else 0. A failing checker raises; it never scores.

        The same check fills the metrics: one 0/1 metric a verdict, and how the answer was given.
        """
        response = trace.last_reply or ""
        result = await agrade(response, self.data.answer, problem=self.data.prompt_text)
        trace.record_metrics({f"verdict/{name}": float(result.verdict == name) for name in VERDICTS})
        trace.record_metric("answer_on_last_line", float(result.last_line))
        trace.record_metric("response_chars", float(len(response)))
        return result.reward

    async def validate(self, runtime: vf.Runtime) -> bool:
        """The known answer, in a box, must verify against itself."""
        return (await agrade(f"\\boxed{{{self.data.answer}}}", self.data.answer)).reward == 1.0


class DapoMathTaskset(vf.Taskset[DapoMathTask, DapoMathConfig]):
    """Math problems with one known answer each."""

    def load(self) -> Iterable[DapoMathTask]:
        for problem in self.problems()[: self.config.limit]:
            data = DapoMathData(  # pyright: ignore[reportCallIssue]
                id=problem.id,
                prompt=PROMPTS[self.config.prompt_style].format(problem=problem.text),
                system_prompt=self.config.instruction,
                answer=problem.answer,
                source=problem.source,
            )
            yield DapoMathTask(data, self.config.task)

    def problems(self) -> list[Problem]:
        config = self.config
        if config.dataset == "arithmetic":
            return arithmetic_problems(config.arithmetic, config.split, config.seed)
        columns = Columns(config.problem_column, config.answer_column, config.id_column)
        return read_problems(config.dataset, columns, config.language)
