"""DAPO-Math as a Verifiers environment: problems, an exact answer checker, an in-process harness.

`grade` and `parse_answer` work without Verifiers. The Verifiers classes are imported when first asked for, so that the
checker stays light and one package can serve several Verifiers versions.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from dapo_math.extract import ParsedAnswer, parse_answer
from dapo_math.grading import CheckerError, Grade, agrade, grade

if TYPE_CHECKING:
    from dapo_math.harness import DapoMathHarness
    from dapo_math.taskset import DapoMathTaskset

_LAZY = {"DapoMathTaskset": "dapo_math.taskset", "DapoMathHarness": "dapo_math.harness"}


def _exported() -> list[str]:
    # Verifiers' plugin loader touches every name in `__all__`: it may only list what the installed version imports.
    names = ["CheckerError", "Grade", "ParsedAnswer", "agrade", "grade", "parse_answer"]
    try:
        version = tuple(int(part) for part in importlib.metadata.version("verifiers").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return names
    return names + ["DapoMathTaskset", "DapoMathHarness"] if version >= (0, 4) else names


__all__ = _exported()  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
