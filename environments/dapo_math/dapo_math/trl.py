"""dapo-math for TRL: a reward function and a dataset, as `GRPOTrainer` takes them; nothing here imports TRL."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from dapo_math.grading import VERDICTS, CheckerError, Grade, grade
from dapo_math.problems import ProblemsConfig, ask, load_problems

if TYPE_CHECKING:
    from datasets import Dataset

Text = str | Sequence[dict[str, Any]]
"""A text, or messages with `role` and `content`: TRL hands over what the dataset's prompts are."""

_log = logging.getLogger(__name__)
# While one answer waits for the checker, the others are graded; the checker itself bounds its processes.
_THREADS = 8


def reward(
    completions: Sequence[Text],
    answer: Sequence[str],
    prompts: Sequence[Text] | None = None,
    *,
    prompt_opened_think: bool = False,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """1.0 for each correct completion, 0.0 for each other; None where the checker failed, which TRL leaves out.

    Args:
        completions: one reply each, a text or messages of which the last counts.
        answer: the known answer of each completion, from the dataset's column.
        prompts: what was asked, so that an answer which only repeats it earns nothing.
        prompt_opened_think: the chat template ends the prompt inside `<think>`; set it with `functools.partial`.
        log_metric: given by TRL; receives the share of each verdict and of checker errors.

    Raises:
        CheckerError: the checker failed on every completion, so there is nothing to learn from.
        ValueError: `completions`, `answer` and `prompts` differ in length.
    """
    asked = [None] * len(completions) if prompts is None else [_last(prompt) for prompt in prompts]
    responses = [_last(completion) for completion in completions]
    one = partial(_grade_or_fault, prompt_opened_think=prompt_opened_think)
    rows = list(zip(responses, answer, asked, strict=True))
    with ThreadPoolExecutor(_THREADS) as threads:
        grades = list(threads.map(lambda row: one(*row), rows))
    faults = [result for result in grades if isinstance(result, CheckerError)]
    if faults and len(faults) == len(grades):
        raise faults[0]
    for fault in faults:
        _log.warning("a completion has no reward, for the checker failed: %s", fault)
    if log_metric and grades:
        counts = Counter(result.verdict if isinstance(result, Grade) else "checker_error" for result in grades)
        for name in (*VERDICTS, "checker_error"):
            log_metric(f"verdict/{name}", counts[name] / len(grades))
    return [result.reward if isinstance(result, Grade) else None for result in grades]


def load_dataset(dataset: str = "math500", **settings: Any) -> Dataset:
    """The problems as rows of `prompt` (messages), `answer`, `id` and `source`.

    Args:
        dataset: as in the environment, a name or a path.
        settings: the environment's other settings: `split`, `prompt_style`, `instruction`, `limit`, ...

    Raises:
        ValueError: a setting that does not exist, or a set that cannot be read; the message names it.
    """
    from datasets import Dataset

    config = ProblemsConfig(dataset=dataset, **settings)
    system = [{"role": "system", "content": config.instruction}] if config.instruction else []
    return Dataset.from_list(
        [
            {
                "prompt": [*system, {"role": "user", "content": ask(problem, config)}],
                "answer": problem.answer,
                "id": problem.id,
                "source": problem.source,
            }
            for problem in load_problems(config)[: config.limit]
        ]
    )


def _grade_or_fault(
    response: str, answer: str, problem: str | None, *, prompt_opened_think: bool
) -> Grade | CheckerError:
    try:
        return grade(response, answer, prompt_opened_think=prompt_opened_think, problem=problem)
    except CheckerError as error:
        return error


def _last(text: Text) -> str:
    """The text, or the content of the last message; a message without content, such as a tool call, is empty."""
    if isinstance(text, str):
        return text
    return text[-1]["content"] or "" if text else ""
