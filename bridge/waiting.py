"""Waits that end, and that say what they wait for."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger("bridge")

STALL_SECONDS = 30.0

T = TypeVar("T")


async def waiting_for(work: Coroutine[Any, Any, T], what: str, timeout: float | None = None) -> T:
    """Await `work`; each 30 seconds a log line names `what` is waited for.

    Raises:
        TimeoutError: it took longer than `timeout` seconds; the message names `what`.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        while True:
            left = STALL_SECONDS if timeout is None else min(STALL_SECONDS, start + timeout - loop.time())
            done, _ = await asyncio.wait({task}, timeout=max(left, 0.0))
            if done:
                return task.result()
            waited = loop.time() - start
            if timeout is not None and waited >= timeout:
                raise TimeoutError(f"gave up after {timeout:.0f} s waiting for {what}")
            logger.warning("waiting for %s (%.0f s so far)", what, waited)
    finally:
        task.cancel()
