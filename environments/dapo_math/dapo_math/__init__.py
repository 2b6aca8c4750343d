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


def load_environment(**settings: Any) -> Any:
    """The environment for Verifiers 0.1.9 to 0.3: see `dapo_math.v0.load_environment`.

    Raises:
        ImportError: the installed Verifiers has no `SingleTurnEnv`; its own `load_environment` takes a taskset.
    """
    version = _verifiers_version()
    if version is None or version >= (0, 4):
        found = "is not installed" if version is None else f"{version[0]}.{version[1]} has no load_environment of v0"
        raise ImportError(
            f"dapo_math.load_environment needs verifiers 0.1.9 to 0.3, but verifiers {found}. "
            'From 0.4 on load the taskset: verifiers.v1.load_environment with {"taskset": {"id": "dapo-math"}}.'
        )
    return importlib.import_module("dapo_math.v0").load_environment(**settings)


def _verifiers_version() -> tuple[int, int] | None:
    try:
        major, minor = importlib.metadata.version("verifiers").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _exported() -> list[str]:
    # Verifiers' plugin loader touches every name in `__all__`: it may only list what the installed version imports.
    # 0.1 has another v1 than later versions; 0.2 runs no harness inside the environment's own process.
    names = ["CheckerError", "Grade", "ParsedAnswer", "agrade", "grade", "parse_answer"]
    version = _verifiers_version() or (0, 0)
    if (0, 0) < version < (0, 4):
        names.append("load_environment")
    if version >= (0, 2):
        names.append("DapoMathTaskset")
    if version >= (0, 3):
        names.append("DapoMathHarness")
    return names


__all__ = _exported()  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
