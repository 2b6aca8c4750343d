"""What a person sees while a run goes on: a live table on a terminal, one line a step elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40, top: float | None = None) -> str:
    """The last values as bars; full height is `top`, or the largest value."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    top = top or max(means) or 1.0
    return "".join(_BLOCKS[max(0, min(8, round(8 * value / top)))] for value in means)


class Display:
    """Progress of one run. Use as a context manager; `status` before the first step, `step` after each."""

    def __init__(self, title: str, max_steps: int, first_step: int, live: bool) -> None:
        self.console = Console(highlight=False)
        self.title, self.max_steps, self.live = title, max_steps, live
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self.console,
        )
        self._bar = self.progress.add_task("starting", total=max_steps, completed=first_step)
        self._rewards: list[float] = []
        self._latest: dict[str, Any] = {}
        self._validation: list[tuple[int, float]] = []
        self._start = time.monotonic()
        self._screen = Live(self._render(), console=self.console, refresh_per_second=2) if live else None

    def __enter__(self) -> "Display":
        if self._screen:
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen:
            self._screen.stop()

    def say(self, text: str) -> None:
        """A line that stays on the screen."""
        self.console.print(text, soft_wrap=True)

    def status(self, text: str) -> None:
        """What the run is doing now."""
        self.progress.update(self._bar, description=text)
        if self._screen:
            self._screen.update(self._render())
        else:
            self.console.print(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def validation(self, step: int, reward: float, problems: int) -> None:
        self._validation.append((step, reward))
        if not self._screen:
            self.console.print(f"  held-out reward after {step} steps: {reward:.3f} ({problems} problems)")

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        self._rewards.append(metrics["reward/mean"])
        self._latest = metrics
        self.progress.update(self._bar, completed=step, description="training")
        if self._screen:
            self._screen.update(self._render())
        else:
            self.console.print(
                f"step {step:4d}/{self.max_steps}  reward {metrics['reward/mean']:.3f}  "
                f"length {metrics['response_length/mean']:.1f}  tokens/s {metrics['throughput/step']:.0f}  "
                f"lag {metrics['staleness/max']:.0f}  k3 {metrics['mismatch/k3']:.1e}  {metrics['time/step']:.2f} s",
                soft_wrap=True,
            )

    def _render(self) -> Panel:
        table = Table.grid(padding=(0, 3))
        latest = self._latest
        if latest:
            table.add_row("reward", f"{latest['reward/mean']:.3f}", sparkline(self._rewards, top=1.0))
            table.add_row("response length", f"{latest['response_length/mean']:.1f} tokens", "")
            table.add_row(
                "throughput", f"{latest['throughput/step']:.0f} tokens/s", f"{latest['time/step']:.2f} s a step"
            )
            table.add_row("policy lag", f"{latest['staleness/max']:.0f} versions", "")
            table.add_row(
                "engine vs trainer", f"{latest['mismatch/abs_max']:.1e}", "largest |p - q| of the step's tokens"
            )
        if self._validation:
            text = "  ".join(f"{reward:.3f} (step {step})" for step, reward in self._validation[-3:])
            table.add_row("held-out reward", text, "")
        return Panel(Group(table, self.progress), title=self.title, title_align="left")


@contextlib.contextmanager
def checking_bar(live: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while tasks are checked, gone afterwards; yields what takes (done, total)."""
    columns = TextColumn("checking known answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not live) as progress:
        bar = progress.add_task("")
        yield lambda done, total: progress.update(bar, completed=done, total=total)
