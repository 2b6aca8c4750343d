"""The environment behind `load_environment`: Verifiers 0.1.9 to 0.3, and the trainers that pin one of them."""

import asyncio
from collections.abc import Callable
from typing import Any

from datasets import Dataset

# Verifiers 0.4, which is what types are checked against, has none of these.
from verifiers import Parser, Rubric, SingleTurnEnv  # pyright: ignore[reportAttributeAccessIssue]

from dapo_math.extract import parse_answer
from dapo_math.grading import VERDICTS, agrade
from dapo_math.problems import ProblemsConfig, ask, load_problems

METRICS = (*(f"verdict/{name}" for name in VERDICTS), "answer_on_last_line", "response_chars", "truncated")

_KEY = "dapo_math_metrics"


def load_environment(**settings: Any) -> Any:
    """A single-turn environment over the problems that `settings` select.

    Args:
        settings: the fields of `ProblemsConfig`, under the same names and with the same defaults.

    Returns:
        a `verifiers.SingleTurnEnv`; each row has `prompt`, `answer` and `info` with the problem's `id` and `source`.

    Raises:
        ValueError: an unknown or wrong setting, or a set that cannot be read.
    """
    config = ProblemsConfig.model_validate(settings)
    problems = load_problems(config)
    rows = [
        {
            "question": ask(problem, config),
            "answer": problem.answer,
            "info": {"id": problem.id, "source": problem.source},
        }
        for problem in problems
    ]
    parser = Parser(extract_fn=_parsed)
    return SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        system_prompt=config.instruction,
        parser=parser,
        rubric=MathRubric(parser),
    )


class MathRubric(Rubric):
    """Reward 1 for a correct final answer, and the metrics of the v1 task as functions of weight 0.

    Verifiers turns whatever a reward function raises into a reward of 0 with a line in the log. So the answer is
    checked before Verifiers calls any: a `CheckerError` leaves `score_rollout` and `score_group`, and there is no
    reward.
    """

    def __init__(self, parser: Any) -> None:
        functions = [_reads("correct"), *(_reads(name) for name in METRICS)]
        super().__init__(funcs=functions, weights=[1.0] + [0.0] * len(METRICS), parser=parser)

    async def score_rollout(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        await _check(state)
        return await super().score_rollout(state, *args, **kwargs)

    async def score_group(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.gather(*(_check(state) for state in states))
        return await super().score_group(states, *args, **kwargs)


async def _check(state: Any) -> None:
    """Put the reward and the metrics of a rollout into its state.

    Raises:
        CheckerError: as in `agrade`.
    """
    response = _last(state["completion"], "assistant")
    result = await agrade(response, state["answer"], problem=_last(state["prompt"], "user"))
    state[_KEY] = {
        "correct": result.reward,
        **{f"verdict/{name}": float(result.verdict == name) for name in VERDICTS},
        "answer_on_last_line": float(result.last_line),
        "response_chars": float(len(response)),
        "truncated": float(any(_field(step, "is_truncated") for step in state.get("trajectory") or [])),
    }


def _reads(name: str) -> Callable[..., float]:
    """A reward function that looks its value up in the checked state; Verifiers takes its name for the metric's."""

    def value(state: Any) -> float:
        return state[_KEY][name]

    value.__name__ = name
    return value


def _last(messages: Any, role: str) -> str:
    """Text of the last message of `role`. Messages are a string, dicts or models, which differs between versions."""
    if messages is None or isinstance(messages, str):
        return messages or ""
    for message in reversed(messages):
        if _field(message, "role") == role:
            content = _field(message, "content") or ""
            if isinstance(content, str):
                return content
            return "\n\n".join(str(_field(part, "text") or "") for part in content)
    return ""


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _parsed(text: str) -> str | None:
    return parse_answer(text).text
