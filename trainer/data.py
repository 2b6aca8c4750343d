"""Which problem comes next: endless epochs over the tasks, each in its own seeded order, resumable by position."""

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskOrder(Generic[T]):
    """`position` counts the tasks handed out; the same seed and position always give the same task."""

    def __init__(self, tasks: Sequence[T], seed: int, position: int = 0) -> None:
        self.tasks, self.seed, self.position = tasks, seed, position
        self._epoch = -1
        self._order: list[int] = []

    def take(self, count: int) -> list[T]:
        """The next `count` tasks."""
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.tasks))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = list(range(len(self.tasks)))
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            taken.append(self.tasks[self._order[index]])
            self.position += 1
        return taken
