"""Asks math-verify in processes that can be killed: a deadline, a memory limit, and no worker outlives its parent.

math-verify hands answers to SymPy, where `9^{9^{9}}` holds the interpreter for good and `9!!!!` takes a gigabyte; its
own timeouts rest on SIGALRM, which works in a main thread alone. So each question goes to a worker process.
"""

import asyncio
import multiprocessing
import multiprocessing.context as context
import os
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver, spawn
from typing import Any, cast

import pebble
from pebble import ProcessExpired, ProcessPool

from dapo_math import worker

DEADLINE_SECONDS = 2.0
MEMORY_BYTES = 2 * 2**30
TASKS_PER_WORKER = 2000
# Waiting for a free worker is not the answer's fault, but it must end as well.
QUEUE_SECONDS = 120.0


class CheckerError(RuntimeError):
    """The checking processes failed: a fault of the environment, never a wrong answer."""


class CheckerTimeout(Exception):
    """The answer took longer than the deadline or more memory than the limit."""


@dataclass(frozen=True)
class Equivalence:
    """Whether `given` is mathematically the same as `gold`, both LaTeX."""

    gold: str
    given: str


class _Popen(popen_forkserver.Popen):
    """Starts a worker without importing the caller's main module in it, which may be heavy or have effects."""

    def _launch(self, process_obj: Any) -> None:
        me, real = threading.get_ident(), spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data = real(name)
            if threading.get_ident() == me:
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = without_main
        try:
            super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            spawn.get_preparation_data = real


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


_lock = threading.Lock()
_pool: ProcessPool | None = None
_owner: int | None = None


def _shared_pool() -> ProcessPool:
    """The process's pool, made on first use; a forked child makes its own."""
    global _pool, _owner
    with _lock:
        if _pool is None or _owner != os.getpid() or not _pool.active:
            pebble.CONSTS.term_timeout = 0.05  # a worker inside SymPy never minds SIGTERM: go on to SIGKILL
            if forkserver._forkserver._forkserver_pid is None:  # pyright: ignore[reportAttributeAccessIssue]
                multiprocessing.set_forkserver_preload([worker.__name__])
            _pool = ProcessPool(
                max_workers=max(1, min(4, (os.cpu_count() or 2) // 2)),
                max_tasks=TASKS_PER_WORKER,
                initializer=worker.confine,
                initargs=(MEMORY_BYTES,),
                context=cast(Any, _Context()),
            )
            _owner = os.getpid()
        return _pool


def _ask(question: Equivalence) -> Future[bool]:
    try:
        return _shared_pool().schedule(worker.check, (question.gold, question.given), timeout=DEADLINE_SECONDS)
    except RuntimeError as error:
        raise CheckerError(f"the answer checker cannot start: {error}") from error


def _reason(error: BaseException) -> Exception:
    """What an exception of the pool means to the caller."""
    if isinstance(error, FutureTimeout | MemoryError | RecursionError):
        return CheckerTimeout(str(error))
    if isinstance(error, ProcessExpired):
        # The memory limit ends some workers from inside C code; the answer did that.
        return CheckerTimeout(f"the worker ended with code {error.exitcode}")
    return CheckerError(f"the answer checker failed: {type(error).__name__}: {error}")


def equivalent(question: Equivalence) -> bool:
    """Blocking form.

    Raises:
        CheckerTimeout, CheckerError: see there.
    """
    future = _ask(question)
    try:
        return future.result(QUEUE_SECONDS)
    except Exception as error:
        if isinstance(error, FutureTimeout) and not future.done():
            raise CheckerError(f"no worker was free within {QUEUE_SECONDS:.0f} s") from error
        raise _reason(error) from error


async def equivalent_async(question: Equivalence) -> bool:
    """As `equivalent`, on the running event loop."""
    future = _ask(question)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), QUEUE_SECONDS)
    except Exception as error:
        if isinstance(error, FutureTimeout) and not future.done():
            raise CheckerError(f"no worker was free within {QUEUE_SECONDS:.0f} s") from error
        raise _reason(error) from error
