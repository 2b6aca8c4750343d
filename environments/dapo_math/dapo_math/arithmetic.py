"""Integer arithmetic problems, made from a seed: nothing to download, train and test disjoint."""

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig

from dapo_math.sources import Problem

Operation = Literal["+", "-", "*"]

_ENUMERABLE = 200_000


class ArithmeticConfig(BaseConfig):
    """Problems of the form `12 + 34 = ?`."""

    operations: list[Operation] = ["+", "-"]
    """Which operations occur; one a problem."""
    low: int = 0
    """Smallest operand."""
    high: int = 99
    """Largest operand."""
    terms: int = Field(default=2, ge=2, le=8)
    """Operands of a problem."""
    test_size: int = Field(default=256, ge=1)
    """Problems held out for `split = "test"`."""
    train_size: int = Field(default=20_000, ge=1)
    """At most so many training problems."""


def arithmetic_problems(config: ArithmeticConfig, split: str, seed: int) -> list[Problem]:
    """The problems of one split, in an order that depends on the seed alone.

    Problems that differ in the order of their operands alone are on the same side of the split.

    Raises:
        ValueError: `low` exceeds `high`, or there are fewer problems than `test_size` plus one.
    """
    if config.low > config.high:
        raise ValueError(f"arithmetic.low = {config.low} exceeds arithmetic.high = {config.high}")
    if not config.operations:
        raise ValueError("arithmetic.operations is empty; name at least one of + - *")
    families: dict[str, list[Problem]] = {}
    for operation, operands in _candidates(config, seed):
        key = f"{operation}{sorted(operands)}"
        families.setdefault(key, []).append(_problem(operation, operands))
    keys = sorted(families, key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    test: list[Problem] = []
    rest: list[Problem] = []
    for key in keys:
        (test if len(test) < config.test_size else rest).extend(families[key])
    if len(test) < config.test_size or not rest:
        raise ValueError(
            f"arithmetic has only {len(test) + len(rest)} problems with these settings, too few to hold out "
            f"test_size = {config.test_size}; raise high or terms, or lower test_size"
        )
    test, rest = test[: config.test_size], rest[: config.train_size]
    problems = test if split == "test" else rest
    random.Random(f"{seed}/{split}").shuffle(problems)
    return problems


def _candidates(config: ArithmeticConfig, seed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every problem where they can be enumerated, else a seeded sample large enough for both splits."""
    span = config.high - config.low + 1
    if len(config.operations) * span**config.terms <= _ENUMERABLE:
        for operation in config.operations:
            for number in range(span**config.terms):
                operands = []
                for _ in range(config.terms):
                    number, digit = divmod(number, span)
                    operands.append(config.low + digit)
                yield operation, tuple(operands)
        return
    rng = random.Random(f"{seed}/sample")
    seen: set[tuple[str, tuple[int, ...]]] = set()
    while len(seen) < 2 * config.test_size + config.train_size:
        operands = tuple(rng.randint(config.low, config.high) for _ in range(config.terms))
        candidate = rng.choice(config.operations), operands
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _problem(operation: str, operands: tuple[int, ...]) -> Problem:
    result = operands[0]
    for operand in operands[1:]:
        result = {"+": result + operand, "-": result - operand, "*": result * operand}[operation]
    text = f" {operation} ".join(str(operand) for operand in operands)
    return Problem(id=f"arithmetic/{text}", text=f"{text} = ?", answer=str(result), source="arithmetic")
