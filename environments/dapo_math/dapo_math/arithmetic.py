"""Integer arithmetic problems, made from a seed: nothing to download, train and test disjoint."""

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field
from pydantic_config import BaseConfig

from dapo_math.sources import Problem

Operation = Literal["+", "-", "*"]

Candidate = tuple[Operation, tuple[int, ...]]

# So many problems are listed and split; of more, a sample is drawn.
_ENUMERABLE = 200_000
_DRAWS = 20


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
    operations = list(dict.fromkeys(config.operations))
    span = config.high - config.low + 1
    wanted = 2 * config.test_size + config.train_size
    if len(operations) * span**config.terms <= max(_ENUMERABLE, 2 * wanted):
        test, train = _split_all(_every(operations, config), config, seed)
    else:
        test, train = _split_sample(_endless(operations, config, seed), config)
    problems = [_problem(*candidate) for candidate in (test if split == "test" else train)]
    random.Random(f"{seed}/{split}").shuffle(problems)
    return problems


def _family(candidate: Candidate) -> str:
    """The same for problems that differ in the order of their operands alone."""
    return f"{candidate[0]}{sorted(candidate[1])}"


def _split_all(
    candidates: Iterable[Candidate], config: ArithmeticConfig, seed: int
) -> tuple[list[Candidate], list[Candidate]]:
    families: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(_family(candidate), []).append(candidate)
    test: list[Candidate] = []
    rest: list[Candidate] = []
    for key in sorted(families, key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest()):
        (test if len(test) < config.test_size else rest).extend(families[key])
    if len(test) < config.test_size or not rest:
        raise _too_few(len(test) + len(rest), config)
    return test[: config.test_size], rest[: config.train_size]


def _split_sample(candidates: Iterator[Candidate], config: ArithmeticConfig) -> tuple[list[Candidate], list[Candidate]]:
    """Test problems are drawn first, so that they do not depend on how many are trained on."""
    # Few families may hold most of the problems, so the draws are counted, not awaited.
    test: dict[str, Candidate] = {}
    for candidate in itertools.islice(candidates, _DRAWS * config.test_size):
        test.setdefault(_family(candidate), candidate)
        if len(test) == config.test_size:
            break
    train: dict[Candidate, None] = {}
    for candidate in itertools.islice(candidates, _DRAWS * config.train_size):
        if _family(candidate) not in test:
            train[candidate] = None
        if len(train) == config.train_size:
            break
    if len(test) < config.test_size or not train:
        raise _too_few(len(test) + len(train), config)
    return list(test.values()), list(train)


def _too_few(found: int, config: ArithmeticConfig) -> ValueError:
    return ValueError(
        f"arithmetic has only {found} problems with these settings, too few to hold out "
        f"test_size = {config.test_size}; raise high or terms, or lower test_size"
    )


def _every(operations: list[Operation], config: ArithmeticConfig) -> Iterator[Candidate]:
    span = config.high - config.low + 1
    for operation in operations:
        for number in range(span**config.terms):
            operands = []
            for _ in range(config.terms):
                number, digit = divmod(number, span)
                operands.append(config.low + digit)
            yield operation, tuple(operands)


def _endless(operations: list[Operation], config: ArithmeticConfig, seed: int) -> Iterator[Candidate]:
    rng = random.Random(f"{seed}/sample")
    while True:
        operands = tuple(rng.randint(config.low, config.high) for _ in range(config.terms))
        yield rng.choice(operations), operands


def _problem(operation: Operation, operands: tuple[int, ...]) -> Problem:
    result = operands[0]
    for operand in operands[1:]:
        result = {"+": result + operand, "-": result - operand, "*": result * operand}[operation]
    text = f" {operation} ".join(str(operand) for operand in operands)
    return Problem(id=f"arithmetic/{text}", text=f"{text} = ?", answer=str(result), source="arithmetic")
