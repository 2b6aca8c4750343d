"""Asks math-verify in processes that can be killed: a deadline, a memory limit, and no worker outlives its parent.

math-verify hands answers to SymPy, where `9^{9^{9}}` holds the interpreter for good and `9!!!!` takes a gigabyte; its
own timeouts rest on SIGALRM, which works in a main thread alone. So each question goes to a worker process.
"""

import asyncio
import os
import signal
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, cast

import pebble
from pebble import ProcessExpired, ProcessPool

from dapo_math import forkserver

Job = Literal["check", "reads"]
DEADLINE_SECONDS = 2.0
MEMORY_BYTES = 2 * 2**30
TASKS_PER_WORKER = 2000
# Two at least: while a hostile answer holds one worker until its deadline, the others go on.
WORKERS = max(2, min(4, os.cpu_count() or 2))
# Waiting for a free worker is not the answer's fault, but it must end as well.
QUEUE_SECONDS = 120.0

# How a worker ends that somebody else ended: killed from outside, or (255) together with its fork server. An answer
# that breaks a worker by itself makes it abort or crash in C code, which are other codes.
_ENDED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 255)


class CheckerError(RuntimeError):
    """The checking processes failed: a fault of the environment, never a wrong answer."""


class CheckerTimeout(Exception):
    """The answer took longer than the deadline or more memory than the limit."""


class _PoolGone(Exception):
    """The pool broke between its last use and this one, or could not start."""


@dataclass(frozen=True)
class Equivalence:
    """Whether `given` is mathematically the same as `gold`, both LaTeX."""

    gold: str
    given: str


_lock = threading.Lock()
_pool: ProcessPool | None = None


def _forget_pool() -> None:
    # A forked child has none of the pool's threads, and may have inherited the lock while it was held.
    global _lock, _pool
    _lock, _pool = threading.Lock(), None
    forkserver.forget()


os.register_at_fork(after_in_child=_forget_pool)


def _ask(job: Job, *args: str) -> Future[bool]:
    """Schedules a function of `worker` on the process's pool, which is made on first use and replaced when it broke."""
    global _pool
    from dapo_math import worker  # here, for it imports SymPy

    with _lock:
        if _pool is not None and not _pool.active:
            broken, _pool = _pool, None
            threading.Thread(target=_close, args=(broken,), daemon=True).start()
        if _pool is None:
            pebble.CONSTS.term_timeout = 0.05  # a worker inside SymPy never minds SIGTERM: go on to SIGKILL
            forkserver.preload("dapo_math.warm")
            _pool = ProcessPool(
                max_workers=WORKERS,
                max_tasks=TASKS_PER_WORKER,
                initializer=worker.confine,
                initargs=(MEMORY_BYTES,),
                context=cast(Any, forkserver.Context()),
            )
        try:
            return _pool.schedule(getattr(worker, job), args, timeout=DEADLINE_SECONDS)
        except (RuntimeError, OSError) as error:
            raise _PoolGone(str(error)) from error


def _close(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _blameless(error: BaseException) -> bool:
    """Whether the worker was lost for no reason of the answer's, so that asking again is right."""
    if isinstance(error, ProcessExpired):
        return error.exitcode in _ENDED_FROM_OUTSIDE
    return isinstance(error, BrokenProcessPool | _PoolGone)


def _reason(error: BaseException) -> Exception:
    """What an exception of the pool means to the caller."""
    if isinstance(error, FutureTimeout | MemoryError | RecursionError):
        return CheckerTimeout(str(error))
    if isinstance(error, ProcessExpired) and not _blameless(error):
        # The memory limit ends some workers from inside C code; the answer did that.
        return CheckerTimeout(f"the worker ended with code {error.exitcode}")
    return CheckerError(f"the answer checker failed: {type(error).__name__}: {error}")


def _overfull() -> CheckerError:
    return CheckerError(f"no worker was free within {QUEUE_SECONDS:.0f} s")


def equivalent(question: Equivalence) -> bool:
    """Blocking form.

    Raises:
        CheckerTimeout, CheckerError: see there.
    """
    for attempt in (1, 2):
        future = None
        try:
            future = _ask("check", question.gold, question.given)
            return future.result(QUEUE_SECONDS)
        except Exception as error:
            if future is not None and not future.done():
                future.cancel()
                raise _overfull() from error
            if attempt == 2 or not _blameless(error):
                raise _reason(error) from error
    raise AssertionError("unreachable")


async def equivalent_async(question: Equivalence) -> bool:
    """As `equivalent`, on the running event loop."""
    return await _answer_async("check", question.gold, question.given)


async def reads_async(answer: str) -> bool:
    """Whether math-verify finds mathematics in `answer`, and not text alone.

    Raises:
        CheckerTimeout, CheckerError: see there.
    """
    return await _answer_async("reads", answer)


async def _answer_async(job: Job, *args: str) -> bool:
    for attempt in (1, 2):
        future = None
        try:
            future = await asyncio.to_thread(_ask, job, *args) if _pool is None else _ask(job, *args)
            return await asyncio.wait_for(asyncio.wrap_future(future), QUEUE_SECONDS)
        except Exception as error:
            if future is not None and (future.cancelled() or not future.done()):
                raise _overfull() from error
            if attempt == 2 or not _blameless(error):
                raise _reason(error) from error
    raise AssertionError("unreachable")
