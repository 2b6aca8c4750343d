"""Keeps captured calls on disk: Parquet files for what is settled, a journal for what came last.

A call is appended to `journal.jsonl` as one line; full journals become `calls-NNNNNN.parquet`. Whatever ends the
process, what was appended before is there afterwards: a line that was cut is detected and dropped with a message.
"""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from bridge.protocol import BridgeError, ModelCall

logger = logging.getLogger("bridge")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ModelCall).decode


class CallLog:
    """An append-only folder of calls.

    Args:
        folder: created where it does not exist; calls that are there stay.
        rows: calls in one Parquet file.
    """

    def __init__(self, folder: Path, rows: int = 4096) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, rows
        self._journal = folder / "journal.jsonl"
        self._pending = _read_journal(self._journal)
        for partial in folder.glob("*.partial"):
            logger.warning("dropped %s, which was not finished; its calls are in the journal still", partial)
            partial.unlink()
        self._settle()
        self._file = self._journal.open("ab")

    def append(self, call: ModelCall) -> None:
        self._file.write(_encode(call) + b"\n")
        self._file.flush()
        self._pending.append(call)
        if len(self._pending) >= self.rows:
            self._file.close()
            self._settle()
            self._file = self._journal.open("ab")

    def close(self) -> None:
        """Everything into Parquet."""
        self._file.close()
        self._settle()

    def _settle(self) -> None:
        """The journal's calls as a Parquet file of their own: complete under its name, or not there."""
        if not self._pending:
            self._journal.unlink(missing_ok=True)
            return
        number = 1 + max((int(path.stem.split("-")[1]) for path in self.folder.glob("calls-*.parquet")), default=-1)
        path = self.folder / f"calls-{number:06d}.parquet"
        partial = path.with_suffix(".partial")
        _write_parquet(self._pending, partial)
        partial.rename(path)
        self._pending = []
        self._journal.unlink(missing_ok=True)


def read_calls(folder: Path) -> list[ModelCall]:
    """All calls in a folder that nobody writes to, oldest first; a call that the end of a process left both in the
    journal and in a file counts once."""
    import pyarrow.parquet

    calls: dict[tuple[str, int, float], ModelCall] = {}
    for path in sorted(folder.glob("calls-*.parquet")):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            call = ModelCall.from_dict({**row, "sampling": msgspec.json.decode(row["sampling"])})
            calls[call.session, call.index, call.end] = call
    for call in _read_journal(folder / "journal.jsonl"):
        calls.setdefault((call.session, call.index, call.end), call)
    return list(calls.values())


def _read_journal(path: Path) -> list[ModelCall]:
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    calls = []
    for number, line in enumerate(lines, 1):
        try:
            calls.append(_decode(line))
        except msgspec.MsgspecError as error:
            if number < len(lines):
                raise BridgeError(f"{path} line {number} is damaged: {error}") from error
            tail = line
    if tail:
        logger.warning("dropped the last %d bytes of %s: the call there was cut while it was written", len(tail), path)
    return calls


def _write_parquet(calls: list[ModelCall], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    span = pyarrow.struct([(name, pyarrow.int32()) for name in ("version", "start", "end")])
    schema = pyarrow.schema(
        [
            ("session", pyarrow.string()),
            ("index", pyarrow.int32()),
            ("dialect", pyarrow.string()),
            ("prompt_ids", pyarrow.list_(pyarrow.int32())),
            ("completion_ids", pyarrow.list_(pyarrow.int32())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("versions", pyarrow.list_(span)),
            ("sampling", pyarrow.string()),
            ("finish_reason", pyarrow.string()),
            *((name, pyarrow.float64()) for name in ("queued", "first_token", "end")),
            ("replica", pyarrow.int32()),
            ("retries", pyarrow.int32()),
            ("error", pyarrow.string()),
        ]
    )
    rows: list[dict[str, Any]] = [
        {**call.as_dict(), "sampling": msgspec.json.encode(call.sampling).decode()} for call in calls
    ]
    with path.open("wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), file)
        file.flush()
        os.fsync(file.fileno())
