"""The Verifiers v1 taskset: problems as tasks, the checker as their reward."""

from collections.abc import Iterable

import verifiers.v1 as vf

from dapo_math.check import Form, find_fault, prove_checker
from dapo_math.grading import VERDICTS, agrade
from dapo_math.problems import ProblemsConfig, ask, asked, load_problems

_proven = False


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
    prompt_style: str = "boxed"
    """How the prompt asks for the answer."""
    level: int | None = None
    """Its difficulty, where the set has one."""
    subject: str | None = None
    """Its field of mathematics, where the set names one."""


class DapoMathTask(vf.Task[DapoMathData]):
    """One problem; reward 1 for a correct final answer."""

    @property
    def key(self) -> str:
        return f"{self.data.source}/{self.data.id}"

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for a correct final answer, else 0. A failing checker raises; it never scores.

        The same check fills the metrics: one 0/1 metric a verdict, how the answer was given, and whether a limit cut
        the response off.
        """
        response = trace.last_reply or ""
        result = await agrade(response, self.data.answer, problem=self.data.prompt_text)
        trace.record_metrics({f"verdict/{name}": float(result.verdict == name) for name in VERDICTS})
        trace.record_metric("answer_on_last_line", float(result.last_line))
        trace.record_metric("response_chars", float(len(response)))
        trace.record_metric("truncated", float(trace.is_truncated))
        return result.reward

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Whether this task can be trained on; the first call also proves that the checker works in this process.

        The known answer must earn the reward, given as the prompt asks for it, and the problem itself must not.

        Raises:
            ValueError: it cannot, and why.
            CheckerError: the checking processes do not work here.
        """
        global _proven
        if not _proven:
            await prove_checker()
            _proven = True
        prompt, style = self.data.prompt_text, self.data.prompt_style
        forms: tuple[Form, ...] = ("line",) if style == "answer_line" else ("box",)
        if fault := await find_fault(asked(prompt, style), prompt, self.data.answer, forms):
            raise ValueError(f"{fault}; drop_ids = [{self.data.id!r}] leaves it out")
        return True


class DapoMathTaskset(vf.Taskset[DapoMathTask, DapoMathConfig]):
    """Math problems with one known answer each."""

    def load(self) -> Iterable[DapoMathTask]:
        for index, problem in enumerate(load_problems(self.config)):
            data = DapoMathData(  # pyright: ignore[reportCallIssue]
                idx=index,  # Verifiers 0.2 asks for it; later versions set it themselves
                id=problem.id,
                prompt=ask(problem, self.config),
                system_prompt=self.config.instruction,
                answer=problem.answer,
                source=problem.source,
                prompt_style=self.config.prompt_style,
                level=problem.level,
                subject=problem.subject,
            )
            yield DapoMathTask(data, self.config.task)
