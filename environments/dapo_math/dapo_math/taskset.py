"""The Verifiers v1 taskset: problems as tasks, the checker as their reward."""

from collections.abc import Iterable

import verifiers.v1 as vf

from dapo_math.grading import VERDICTS, agrade
from dapo_math.problems import ProblemsConfig, ask, load_problems
from dapo_math.sources import Problem


class DapoMathConfig(ProblemsConfig, vf.TasksetConfig):
    """Which problems, and how they are asked."""


class DapoMathData(vf.TaskData):
    """A problem with its known answer."""

    # Verifiers before 0.4 has no such field.
    id: str | None = None
    """The problem's durable id within its set."""
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
        for index, problem in enumerate(self.problems()[: self.config.limit]):
            data = DapoMathData(  # pyright: ignore[reportCallIssue]
                idx=index,  # Verifiers 0.2 asks for it; later versions set it themselves
                id=problem.id,
                prompt=ask(problem, self.config),
                system_prompt=self.config.instruction,
                answer=problem.answer,
                source=problem.source,
            )
            yield DapoMathTask(data, self.config.task)

    def problems(self) -> list[Problem]:
        return load_problems(self.config)
