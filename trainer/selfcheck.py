"""Checks the tasks of a run before anything trains on them: each must accept its own known answer."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.runtimes.subprocess import SubprocessConfig
from verifiers.v1.task import Task

from trainer.errors import UserError

_AT_ONCE = 32
_SHOWN = 10
_log = logging.getLogger(__name__)


def checkable(task: Task) -> bool:
    """Whether `task` brings a `validate()` that runs here: without a container, and without a set-up of its own."""
    kind = type(task)
    plain = kind.setup is Task.setup and not kind.NEEDS_CONTAINER and not task.data.image
    return plain and kind.validate is not Task.validate


async def checked_tasks(
    tasks: Sequence[Task],
    name: str,
    on_failure: Literal["stop", "drop", "off"],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Task]:
    """The tasks to train on: all of them, or with `on_failure = "drop"` those that pass their own `validate()`.

    Tasks that `checkable` excludes pass unchecked; `vf-validate` can check those.

    Args:
        tasks: in their own order, which is kept.
        name: of the taskset, for messages.
        on_failure: the run's `self_check`.
        progress: called with how many are done, of how many.

    Raises:
        UserError: a task fails and `on_failure` is "stop", or every task fails; the tasks are named.
    """
    pending = [index for index, task in enumerate(tasks) if checkable(task)] if on_failure != "off" else []
    if not pending:
        return list(tasks)
    total, failed = len(pending), dict[int, str]()
    waiting = iter(pending)
    done = 0

    async def work() -> None:
        nonlocal done
        for index in waiting:
            if fault := await _fault(tasks[index], runtime):
                failed[index] = fault
            done += 1
            progress(done, total)
            if done % 64 == 0:
                await asyncio.sleep(0)  # checks that never wait must not shut out Ctrl-C

    unique = f"self-check-{uuid.uuid4().hex}"  # a second run, or one that was killed, has a folder of its own
    async with provision_runtime(SubprocessConfig(), name=unique) as runtime, asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(work())
    if not failed:
        return list(tasks)
    lines = [f"  {tasks[index].key}: {fault}" for index, fault in sorted(failed.items())]
    shown = "\n".join([*lines[:_SHOWN], *([f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])])
    what = f"{len(failed)} of {total} tasks of {name!r} do not accept their own known answer:\n{shown}"
    if len(failed) == len(tasks):
        raise UserError(f"{what}\nNothing is left to train on; is the answer column the right one?")
    if on_failure == "stop":
        raise UserError(
            f"{what}\nNo answer could ever be rewarded rightly there. Put the rows right, or train without them: "
            "--self-check drop"
        )
    _log.warning("%s", what)
    return [task for index, task in enumerate(tasks) if index not in failed]


async def _fault(task: Task, runtime: object) -> str | None:
    """Why the task cannot be trained on; a `validate()` that raises says so itself."""
    try:
        valid = await task.validate(runtime)  # type: ignore[arg-type]
    except Exception as error:  # any environment's own code: whatever it raises is a finding about this task
        return f"{type(error).__name__}: {error}"
    return "its known answer is refused" if valid is False else None
