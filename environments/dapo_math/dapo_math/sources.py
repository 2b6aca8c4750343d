"""Reads problems from the sets in the package, from local files and from the hub; a bad row is named, never skipped."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

SHIPPED = ("aime24", "aime25", "amc23", "gsm8k", "math500")
_DATA = Path(__file__).parent / "data"

HUB: dict[str, tuple[str, str | None, str]] = {
    "dapo-17k": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
    "dapo-17k-processed": ("open-r1/DAPO-Math-17k-Processed", "all", "train"),
    "dapo-17k-filtered": ("hamishivi/DAPO-Math-17k-Processed_filtered", None, "train"),
}
"""Name: hub id, configuration, split."""

_WRAPPER_HEAD = "Solve the following math problem step by step."
_WRAPPER = re.compile(
    re.escape(_WRAPPER_HEAD) + r".*?where \$Answer is the answer to the problem\.\s*(.*?)\s*"
    r'Remember to put your answer on its own line after "Answer:"\.\s*',
    re.DOTALL,
)
# Lone surrogates come from broken JSON escapes and cannot be sent to anybody.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_PLAIN_DEGREES = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°)", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One problem: durable id, text without any instruction, known answer, name of its set."""

    id: str
    text: str
    answer: str
    source: str


@dataclass(frozen=True)
class Columns:
    """Column names of a file; those left None are looked for under the usual names."""

    problem: str | None = None
    answer: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Conflict:
    """A problem that was left out, for its rows give different answers."""

    id: str
    answers: tuple[str, ...]


def read_problems(dataset: str, columns: Columns, language: str = "all") -> list[Problem]:
    """All problems of `dataset`: a shipped set, a hub set, or a path to a `.jsonl`, `.json` or `.parquet` file.

    Rows that repeat a problem count once; problems that occur with different answers are left out.

    Raises:
        ValueError: as in `read_with_conflicts`.
    """
    return read_with_conflicts(dataset, columns, language)[0]


def read_with_conflicts(dataset: str, columns: Columns, language: str = "all") -> tuple[list[Problem], list[Conflict]]:
    """The problems of `dataset`, as `read_problems` gives them, and those that were left out.

    Raises:
        ValueError: an unknown name or file type, a file that cannot be read or is empty, or a row that cannot be used,
            named by file, number and fault.
    """
    if dataset in SHIPPED:
        rows: Iterable[tuple[int, dict[str, Any]]] = _json_lines(_DATA / f"{dataset}.jsonl")
        where, source = f"{dataset}.jsonl", dataset
    elif dataset in HUB:
        rows, where, source = enumerate(_hub_rows(dataset, language), 1), HUB[dataset][0], dataset
    elif Path(dataset).suffix in (".jsonl", ".json", ".parquet"):
        rows, where, source = _file_rows(Path(dataset)), dataset, Path(dataset).stem
    else:
        known = ", ".join(["arithmetic", *SHIPPED, *HUB])
        raise ValueError(f"dataset {dataset!r} is neither one of {known} nor a path to a .jsonl or .parquet file")
    problems, conflicts = _deduplicated(_problem(row, number, where, source, columns) for number, row in rows)
    if not problems:
        raise ValueError(f"{where}: no problems" + (", for all of them have conflicting answers" if conflicts else ""))
    return problems, conflicts


def _deduplicated(problems: Iterable[Problem]) -> tuple[list[Problem], list[Conflict]]:
    first: dict[str, Problem] = {}
    answers: dict[str, tuple[str, ...]] = {}
    for problem in problems:  # one at a time: the raw set repeats each problem a hundred times
        known = first.setdefault(problem.text, problem)
        if problem.answer not in (given := answers.get(problem.text, (known.answer,))):
            answers[problem.text] = (*given, problem.answer)
    kept = [problem for text, problem in first.items() if text not in answers]
    return kept, [Conflict(first[text].id, given) for text, given in answers.items()]


def _file_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"dataset file {path} does not exist")
    if path.suffix != ".parquet":
        yield from _json_lines(path)
        return
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path.name}: parquet files need pyarrow: pip install 'dapo-math[hub]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path.name} after row {number}: not a readable parquet file ({error})") from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path.name} row {number}: not valid UTF-8 ({error})") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path.name} row {number}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path.name} row {number}: must be a JSON object, got {type(row).__name__}")
            yield number, row


def _hub_rows(dataset: str, language: str) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"dataset {dataset!r} comes from the hub: pip install 'dapo-math[hub]'") from error
    hub_id, configuration, split = HUB[dataset]
    if configuration is not None:
        configuration = language
    try:
        return cast(Iterable[dict[str, Any]], datasets.load_dataset(hub_id, configuration, split=split))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"dataset {dataset!r} ({hub_id}) cannot be loaded from the hub: {error}") from error


def _problem(row: dict[str, Any], number: int, where: str, source: str, columns: Columns) -> Problem:
    name = f"{where} row {number}"
    text = _text(
        _column(row, columns.problem, ("problem", "question", "source_prompt", "prompt"), "problem", name), name
    )
    answer = _answer(row, columns.answer, name)
    for label, value in (("problem", text), ("answer", answer)):
        if not value:
            raise ValueError(f"{name}: the {label} is empty")
        if found := _CONTROL.search(value):
            raise ValueError(f"{name}: the {label} has control character {found.group()!r} at position {found.start()}")
    if columns.id:
        ident = _column(row, columns.id, (), "id", name)
    else:
        extra = row.get("extra_info")
        index = extra.get("index") if isinstance(extra, dict) else None
        ident = next((value for value in (row.get("id"), row.get("unique_id"), index) if value is not None), None)
    return Problem(
        id=str(ident if ident is not None else f"{source}/{number}"), text=text, answer=answer, source=source
    )


def _column(row: dict[str, Any], chosen: str | None, usual: tuple[str, ...], label: str, name: str) -> Any:
    for key in (chosen,) if chosen else usual:
        if row.get(key) is not None:
            return row[key]
    wanted = repr(chosen) if chosen else " or ".join(map(repr, usual))
    raise ValueError(f"{name}: no column {wanted} for the {label} (it has {sorted(row)}); name it with {label}_column")


def _text(value: Any, name: str) -> str:
    """A problem's text from a string or from a list with exactly one user message, without DAPO's instruction."""
    if isinstance(value, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in value]
        if roles != ["user"]:
            found = f"{roles.count('user')} among {len(roles)} messages"
            raise ValueError(f"{name}: the prompt must be exactly one user message, found {found}")
        value = value[0].get("content")
    if not isinstance(value, str):
        raise ValueError(f"{name}: the problem must be text, got {type(value).__name__}")
    unwrapped = _WRAPPER.fullmatch(value.strip())
    return unwrapped.group(1) if unwrapped else value.strip()


def _answer(row: dict[str, Any], chosen: str | None, name: str) -> str:
    """The known answer, as text: `27.0`, `073`, `336°` become `27`, `73`, `336`, and GSM8K's solution its last line."""
    model = row.get("reward_model")
    if chosen is None and isinstance(model, dict) and model.get("ground_truth") is not None:
        value = model["ground_truth"]
    else:
        value = _column(row, chosen, ("answer", "ground_truth", "solution"), "answer", name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}: the answer must be text or a number, got {type(value).__name__}")
    text = str(value).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip().replace(",", "")
    if match := _PLAIN_DEGREES.fullmatch(text):
        text = match.group(1)
    if re.fullmatch(r"[+-]?\d+\.0+", text):
        text = text.split(".")[0]
    if match := re.fullmatch(r"([+-]?)0+(\d+)", text):
        text = match.group(1) + match.group(2)
    return text
