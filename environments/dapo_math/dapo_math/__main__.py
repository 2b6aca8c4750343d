"""The command line: `python -m dapo_math check --dataset NAME_OR_PATH`."""

import asyncio
import sys

from pydantic_config import cli
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dapo_math.check import Report, check_problems
from dapo_math.grading import CheckerError
from dapo_math.problems import SelectionConfig, select_problems
from dapo_math.sources import SHIPPED

USAGE = "usage: python -m dapo_math check [--dataset NAME_OR_PATH] [--limit N] (--help lists all)"
_SHOWN = 20


class CheckConfig(SelectionConfig):
    """Checks that every known answer of a set verifies against itself; exit code 1 where one does not."""

    dataset: str | None = None
    """As in the environment's `dataset`; unset, every set in the package, and `arithmetic`."""


def _lines(dataset: str, report: Report) -> list[str]:
    """What a person needs to know, worst first."""
    verdict = "[red]FAILED[/red]" if report.failed else "[green]ok[/green]"
    lines = [f"{verdict} {escape(dataset)}: {report.problems} problems, {len(report.failed)} failed"]
    details = (
        ("failed", [(finding.id, finding.fault) for finding in report.failed]),
        ("left out, different answers", [(one.id, " | ".join(one.answers)) for one in report.conflicts]),
        ("compared as text alone", [(finding.id, finding.fault) for finding in report.literal]),
    )
    for label, rows in details:
        lines += [f"  {label}: {escape(id)}: {escape(what)}" for id, what in rows[:_SHOWN]]
        if len(rows) > _SHOWN:
            lines.append(f"  {label}: {len(rows) - _SHOWN} more")
    return lines


def _bars(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)


def check(config: CheckConfig) -> bool:
    """Print what the check finds; whether nothing failed.

    Raises:
        ValueError: a set cannot be read. CheckerError: the checking processes do not work here.
    """
    output, good = Console(highlight=False, soft_wrap=True), True
    for dataset in [config.dataset] if config.dataset else ["arithmetic", *SHIPPED]:
        problems, conflicts = select_problems(dataset, config)
        console = Console(stderr=True)
        with _bars(console) as bars:
            bar = bars.add_task(escape(dataset), total=len(problems))
            report = asyncio.run(check_problems(problems, conflicts, lambda bar=bar: bars.advance(bar)))
        for line in _lines(dataset, report):
            output.print(line)
        good &= not report.failed
    return good


def main(argv: list[str]) -> None:
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0 if argv else 2)
    if argv[0] != "check":
        raise SystemExit(f"error: unknown command {argv[0]!r}\n{USAGE}")
    config = cli(CheckConfig, args=argv[1:])
    try:
        good = check(config)
    except (ValueError, CheckerError) as error:
        raise SystemExit(f"error: {error}") from None
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
