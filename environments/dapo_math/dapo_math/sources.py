"""Reads problems from the sets in the package, from local files and from the hub; a bad row is named, never skipped."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_math.hub import HUB, hub_rows

SHIPPED = ("aime24", "aime25", "amc23", "gsm8k", "math500")
_DATA = Path(__file__).parent / "data"

# The instruction around each problem of the DAPO-Math set; either half may stand alone.
_WRAPPER_HEAD = re.compile(
    r"\s*Solve the following math problem step by step\..{0,200}?where \$Answer is the answer to the problem\.\s*",
    re.DOTALL,
)
_WRAPPER_TAIL = re.compile(r'\s*Remember to put your answer on its own line after "Answer:"\.\s*\Z')
_LEAVE_OUT = "; put the row right, or leave it out with drop_ids"
# Lone surrogates come from broken JSON escapes and cannot be sent to anybody.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_PLAIN_DEGREES = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°)", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        id: durable within its set.
        text: without any instruction.
        answer: the known answer.
        source: name of its set.
        level: difficulty, where the set has one: 1 to 5 in MATH.
        subject: field of mathematics, where the set names one.
    """

    id: str
    text: str
    answer: str
    source: str
    level: int | None = None
    subject: str | None = None


@dataclass(frozen=True)
class Columns:
    """Column names of a file; those left None are looked for under the usual names."""

    problem: str | None = None
    answer: str | None = None
    id: str | None = None
    level: str | None = None


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


def read_with_conflicts(
    dataset: str,
    columns: Columns,
    language: str = "all",
    revision: str | None = None,
    drop_ids: Iterable[str] = (),
) -> tuple[list[Problem], list[Conflict]]:
    """The problems of `dataset`, as `read_problems` gives them, and those that were left out.

    Args:
        dataset, columns, language: as in `read_problems`.
        revision: of a hub set, instead of the one in `HUB`.
        drop_ids: problems to leave out; their rows may be faulty.

    Raises:
        ValueError: an unknown name or file type, a file that cannot be read or is empty, a row that cannot be used,
            named by file, number and fault, or an id in `drop_ids` that no row has.
    """
    if revision is not None and dataset not in HUB:
        raise ValueError(f"revision = {revision!r} is for sets from the hub ({', '.join(HUB)}), not for {dataset!r}")
    if dataset in SHIPPED:
        rows: Iterable[tuple[int, dict[str, Any]]] = _json_lines(_DATA / f"{dataset}.jsonl")
        where, source = f"{dataset}.jsonl", dataset
    elif dataset in HUB:
        rows, where, source = hub_rows(dataset, language, revision), HUB[dataset].id, dataset
    elif Path(dataset).suffix in (".jsonl", ".json", ".parquet"):
        rows, where, source = _file_rows(Path(dataset)), dataset, Path(dataset).stem
    else:
        known = ", ".join(["arithmetic", *SHIPPED, *HUB])
        raise ValueError(f"dataset {dataset!r} is neither one of {known} nor a path to a .jsonl or .parquet file")
    unseen, dropped = set(drop_ids), frozenset(drop_ids)
    # One row at a time: the raw set repeats each row a hundred times, and only the first is kept.
    rows_by_id: dict[str, dict[str, Any]] = {}
    first: dict[str, Problem] = {}
    answers: dict[str, tuple[str, ...]] = {}
    for number, row in rows:
        ident = _id(row, columns.id, f"{where} row {number}", f"{source}/{number}")
        if rows_by_id.setdefault(ident, row) == row and rows_by_id[ident] is not row:
            continue
        if ident in dropped:
            unseen.discard(ident)
            continue
        problem = _problem(row, ident, f"{where} row {number} (id {ident})", source, columns)
        known = first.setdefault(problem.text, problem)
        if problem.answer not in (given := answers.get(problem.text, (known.answer,))):
            answers[problem.text] = (*given, problem.answer)
    if unseen:
        raise ValueError(f"{where}: drop_ids names {sorted(unseen)}, which no row has")
    problems = [problem for text, problem in first.items() if text not in answers]
    conflicts = [Conflict(first[text].id, given) for text, given in answers.items()]
    if not problems:
        raise ValueError(f"{where}: no problems" + (", for all of them have conflicting answers" if conflicts else ""))
    return problems, conflicts


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


def _id(row: dict[str, Any], chosen: str | None, name: str, otherwise: str) -> str:
    if chosen:
        return str(_column(row, chosen, (), "id", name))
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, dict) else None
    usual = (row.get("id"), row.get("unique_id"), index)
    return next((str(value) for value in usual if value is not None), otherwise)


def _problem(row: dict[str, Any], ident: str, name: str, source: str, columns: Columns) -> Problem:
    # A reduced set may keep the published prompt next to its own text.
    prompt = ("prompt", "source_prompt") if isinstance(row.get("prompt"), str) else ("source_prompt", "prompt")
    text = _text(_column(row, columns.problem, ("problem", "question", *prompt), "problem", name), name)
    answer = _answer(row, columns.answer, name)
    for label, value in (("problem", text), ("answer", answer)):
        if not value:
            raise ValueError(f"{name}: the {label} is empty{_LEAVE_OUT}")
        if found := _CONTROL.search(value):
            fault = f"the {label} has control character {found.group()!r} at position {found.start()}"
            raise ValueError(f"{name}: {fault}{_LEAVE_OUT}")
    subject = row.get("subject") or row.get("type")
    return Problem(ident, text, answer, source, _level(row, columns.level, name), str(subject) if subject else None)


def _level(row: dict[str, Any], chosen: str | None, name: str) -> int | None:
    """A level is a whole number, bare or as in MATH's `Level 3`; what else stands there is no level."""
    value = _column(row, chosen, (), "level", name) if chosen else row.get("level")
    found = re.fullmatch(r"(?:[Ll]evel\s*)?(\d{1,9})(?:\.0*)?", str(value).strip(), re.ASCII)
    return int(found.group(1)) if found else None


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
            raise ValueError(f"{name}: the prompt must be exactly one user message, found {found}{_LEAVE_OUT}")
        value = value[0].get("content")
    if not isinstance(value, str):
        raise ValueError(f"{name}: the problem must be text, got {type(value).__name__}")
    if head := _WRAPPER_HEAD.match(value):
        value = value[head.end() :]
    return _WRAPPER_TAIL.sub("", value).strip()


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
