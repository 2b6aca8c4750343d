from pathlib import Path

import pytest
from datasets import load_dataset

from bridge.capture import CaptureStore
from bridge.observe import Metrics
from bridge.protocol import BridgeError, ModelCall
from bridge.storage import CallLog, read_calls
from tests.bridge.test_protocol import call


def numbered(count: int) -> list[ModelCall]:
    return [call(index, [1, 2], [3, index], version=index) for index in range(count)]


def test_calls_come_back_from_disk_as_they_were(tmp_path: Path):
    log = CallLog(tmp_path, rows=3)
    for one in numbered(7):
        log.append(one)
    assert read_calls(tmp_path) == numbered(7), "the last one is in the journal still"
    log.close()
    assert read_calls(tmp_path) == numbered(7) and not (tmp_path / "journal.jsonl").exists()
    rows = load_dataset("parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "c"))
    assert rows["completion_ids"][6] == [3, 6] and rows["logprobs"][6] == [-3.0, -6.0]
    assert rows["versions"][6] == [{"version": 6, "start": 0, "end": 2}]


def test_a_cut_journal_loses_the_cut_call_alone_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = CallLog(tmp_path)
    for one in numbered(4):
        log.append(one)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole) - len(lines[-1]) + 1, len(whole)):
        journal.write_bytes(whole[:cut])
        caplog.clear()
        assert read_calls(tmp_path) == numbered(3)
        assert "the call there was cut while it was written" in caplog.text
    again = CallLog(tmp_path)
    again.append(numbered(5)[4])
    again.close()
    assert [one.index for one in read_calls(tmp_path)] == [0, 1, 2, 4]


def test_an_end_between_parquet_and_journal_doubles_nothing(tmp_path: Path):
    log = CallLog(tmp_path)
    for one in numbered(3):
        log.append(one)
    journal = (tmp_path / "journal.jsonl").read_bytes()
    log.close()
    (tmp_path / "journal.jsonl").write_bytes(journal)
    (tmp_path / "calls-000001.partial").write_bytes(b"half")
    assert read_calls(tmp_path) == numbered(3)
    CallLog(tmp_path).close()
    assert read_calls(tmp_path) == numbered(3) and not list(tmp_path.glob("*.partial"))


def test_a_damaged_line_in_the_middle_is_an_error_and_no_silence(tmp_path: Path):
    log = CallLog(tmp_path)
    for one in numbered(3):
        log.append(one)
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"index":1', b'"index":x'))
    with pytest.raises(BridgeError, match="line 2 is damaged"):
        read_calls(tmp_path)


def test_beyond_its_limit_the_store_drops_the_oldest_sessions_and_counts_them():
    store = CaptureStore(3, Metrics())
    for number in range(5):
        store.add(ModelCall(**{**vars(call(0, [1], [2])), "session": f"s{number}"}))
    assert (store.size, store.dropped) == (3, 2)
    assert store.take(["s0"])["s0"] == [] and len(store.take(["s4"])["s4"]) == 1


def test_a_session_is_idle_only_when_it_has_a_call_and_runs_none():
    store = CaptureStore(10, Metrics())
    assert [store.begin("s"), store.begin("s")] == [0, 1]
    store.add(ModelCall(**{**vars(call(0, [1], [2])), "session": "s"}))
    store.end("s")
    assert store.idle(0.0, 10) == []
    store.end("s")
    assert store.idle(0.0, 10) == ["s"] and store.idle(60.0, 10) == []
    store.take(["s"])
    assert store.idle(0.0, 10) == [] and store.begin("s") == 0
