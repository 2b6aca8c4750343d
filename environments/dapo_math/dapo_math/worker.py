"""Runs in the checking processes: math-verify on one pair of answers."""

import ctypes
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing import forkserver
from typing import Any

from math_verify import parse, verify
from sympy import Expr

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_PR_SET_PDEATHSIG = 1


def confine(memory_bytes: int) -> None:
    """Limit this process's address space and have the kernel end it with its parent."""
    # Every worker is handed a copy of what tells the fork server that the caller lives. Kept, the server would wait for
    # a worker that is stuck in an answer; closed, it ends with the caller and takes the workers along.
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check(gold: str, given: str) -> bool:
    """Whether math-verify holds `given` equal to `gold`; both are boxed first, for bare LaTeX is often not found."""
    if gold.lstrip().startswith("(") and given.lstrip().startswith("\\{"):
        return False  # an ordered pair is not a set
    parsed_gold = _gold(gold)
    parsed_given = parse(f"\\boxed{{{_plain(given)}}}", parsing_timeout=0)
    if not parsed_gold or not parsed_given:
        return False
    if not verify(parsed_gold, parsed_given, timeout_seconds=0):
        return False
    return _close(parsed_gold[0], parsed_given[0])


@lru_cache(maxsize=1024)
def _gold(text: str) -> Any:
    return parse(f"\\boxed{{{text}}}", parsing_timeout=0)


def warm() -> None:
    """Build what math-verify's parser and SymPy build at their first use; workers forked afterwards share it."""
    check(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}")


def reads(answer: str) -> bool:
    """Whether math-verify finds anything but text in `answer`; of a text, it accepts the same text alone."""
    return any(not isinstance(found, str) for found in parse(f"\\boxed{{{answer}}}", parsing_timeout=0))


def _plain(given: str) -> str:
    """Spellings that the parser misreads, in the form that it reads."""
    given = re.sub(r"\+\s*-", "-", given)
    given = re.sub(r"(?<![\d.])(\d+)\.0+(?!\d)", r"\1", given)
    given = re.sub(r"(?<![\d.])1(?=[a-z])", "", given)
    return re.sub(r"(?<![\\\\a-z])exp\s*\(([^()]*)\)", r"e^{\1}", given)


def _close(gold: object, given: object) -> bool:
    """math-verify rounds to six decimals, so small numbers all look alike: numbers must agree to six digits too."""
    if not (isinstance(gold, Expr) and isinstance(given, Expr) and gold.is_number and given.is_number):
        return True
    difference, *sizes = (abs(value.evalf(20)) for value in (gold - given, gold, given))
    if not all(value.is_Number and value.is_finite for value in (difference, *sizes)):
        return True  # infinities and the like have no digits to compare
    return bool(difference <= max(sizes) * 1e-6)
