"""The training command with everything real: Verifiers, vLLM on the CPU, the tiny model."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import tomli
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bridge.transfer
from tests.conftest import forward_logprobs
from trainer.checkpoint import complete_checkpoints
from trainer.cli import main
from trainer.tiny import tiny_model_dir

pytestmark = pytest.mark.engine

RECIPE = ["--env", "dapo-math", "@", "configs/tiny_cpu.toml"]
SMALL = ["--prompts-per-step", "4", "--samples-per-prompt", "4", "--validation.interval", "0", "--progress", "plain"]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "trainer.grpo", *args]


def train(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*RECIPE, *SMALL, *args), capture_output=True, text=True, timeout=300)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module")
def still_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps at learning rate 0."""
    out = tmp_path_factory.mktemp("still")
    done = train(
        *("--max-steps", "5", "--learning-rate", "0", "--output-dir", str(out), "--run-name", "still"),
        *("--validation.interval", "5", "--validation.problems", "16"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out reward: " in done.stdout and str(out / "still") in done.stdout and "next:" in done.stdout
    return out / "still"


def test_at_learning_rate_zero_neither_weights_nor_mismatch_move(still_run: Path):
    before = load_file(tiny_model_dir() / "model.safetensors")
    after = load_file(still_run / "checkpoints" / "step_000005" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    steps = [row for row in metrics(still_run) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert all(row["mismatch/abs_max"] < 1e-4 and row["mismatch/k3"] < 1e-8 for row in steps)
    assert all(row["ratio/mean"] == pytest.approx(1, abs=1e-5) and row["staleness/max"] == 0 for row in steps)


def test_the_tokens_trained_on_are_the_engines_own_with_its_own_logprobs(still_run: Path, tiny: Any):
    model, tokenizer = tiny
    rows = pq.read_table(still_run / "episodes" / "step_000003.parquet").to_pylist()
    assert len(rows) == 16
    for row in rows:
        first = row["sampled"].index(True)
        prompt, completion = row["ids"][:first], row["ids"][first:]
        assert all(row["sampled"][first:]) and row["versions"][first:] == [2] * len(completion)
        expected = forward_logprobs(model, prompt, completion)
        assert (expected - expected.new_tensor(row["logprobs"][first:])).abs().max() < 1e-4
        assert tokenizer.decode(completion, skip_special_tokens=True) == row["response"]
        assert row["prompt"] in tokenizer.decode(prompt)


def test_a_run_folder_holds_what_the_docs_say(still_run: Path):
    names = {path.name for path in still_run.iterdir()}
    assert {"config.toml", "versions.json", "metrics.jsonl", "summary.json", "episodes", "checkpoints", "logs"} <= names
    config = tomli.loads((still_run / "config.toml").read_text())
    assert config["learning_rate"] == 0 and config["taskset"]["dataset"] == "arithmetic"
    summary = json.loads((still_run / "summary.json").read_text())
    assert summary.keys() == {"reward_before", "reward_after", "steps", "seconds"} and summary["steps"] == 5
    assert json.loads((still_run / "versions.json").read_text())["verifiers"]
    assert {"bridge.log", "environment.log", "vllm_0.log"} <= {path.name for path in (still_run / "logs").iterdir()}
    checkpoint = still_run / "checkpoints" / "step_000005"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in checkpoint.iterdir()}
    row = metrics(still_run)[-2]
    for name in ("reward/mean", "truncation_rate", "entropy", "grad_norm", "time/step", "verdict/correct"):
        assert name in row


def test_a_run_killed_anywhere_and_resumed_is_the_run_that_was_not(tmp_path: Path):
    """Equal to the last bit: with one request at a time no sum in the engine depends on what else it is doing."""
    common = [*RECIPE, *SMALL, "--output-dir", str(tmp_path), "--sampling.seed", "7", "--learning-rate", "1e-3"]
    common += ["--bridge.engine.max-num-seqs", "1", "--checkpoint.interval", "1", "--max-steps", "5"]
    common += ["--validation.interval", "2", "--validation.problems", "8"]
    whole = subprocess.run(command(*common, "--run-name", "whole"), capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    folder = tmp_path / "parts"
    resume = ["@", str(folder / "config.toml"), "--resume"]

    def updating(pid: int) -> bool:
        return bool(weight_files(pid)) and bool(complete_checkpoints(folder / "checkpoints"))

    killed_when([*common, "--run-name", "parts"], updating, "inside a weight update")
    killed_when(resume, lambda _: (folder / "checkpoints" / ".step_000003.partial").exists(), "inside a checkpoint")
    last = complete_checkpoints(folder / "checkpoints")[-1].name
    rollout = Random(os.getpid()).uniform(0, 0.5)
    killed_when(resume, lambda _: steps_of(folder) == 4 and not time.sleep(rollout), f"{rollout:.2f} s after step 4")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "vers')  # the line that a kill in the middle of writing leaves
    done = subprocess.run(command(*resume), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

    timed = re.compile(r"time/|throughput/")
    for one, two in zip(metrics(tmp_path / "whole"), metrics(folder), strict=True):
        assert {k: v for k, v in one.items() if not timed.match(k)} == {
            k: v for k, v in two.items() if not timed.match(k)
        }, last
    for step in range(1, 6):
        columns = ["task_id", "ids", "logprobs", "versions", "advantage", "reward"]
        name = Path("episodes", f"step_{step:06d}.parquet")
        assert pq.read_table(tmp_path / "whole" / name, columns=columns).equals(
            pq.read_table(folder / name, columns=columns)
        )
    weights = [load_file(run / "checkpoints/step_000005/model.safetensors") for run in (tmp_path / "whole", folder)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert not list((folder / "checkpoints").glob(".*"))


def killed_when(args: list[str], moment: Callable[[int], bool], name: str) -> None:
    """Start a run and SIGKILL its controller as soon as `moment(pid)` is true."""
    process = subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 180
    try:
        while not moment(process.pid):
            assert process.poll() is None and time.monotonic() < deadline, f"never {name}"
            time.sleep(0.0005)
        everyone = family(psutil.Process(process.pid))
    finally:
        process.kill()
        process.communicate()
    assert not survivors(everyone)


def weight_files(controller: int) -> list[Path]:
    """Weights on their way to the engines of this run."""
    bridges = {process.pid for process in psutil.Process(controller).children()}
    found = Path("/dev/shm").glob("vf-grpo-weights-*/*.safetensors")
    return [path for path in found if _owner(path.parent) in bridges]


def steps_of(folder: Path) -> int:
    return max((row["step"] for row in metrics(folder)), default=0)


def test_two_ranks_train_as_one_command_and_stop_together(tmp_path: Path):
    log = tmp_path / "log"
    args = ["--parallelism.tensor-parallel-size", "2", "--checkpoint.interval", "2", "--max-steps", "1000"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(*RECIPE, *SMALL, *args, "--output-dir", str(tmp_path), "--run-name", "team"),
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + 180
    while "step    3" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    everyone = family(psutil.Process(process.pid))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "checkpoint saved" in log.read_text() and "Traceback" not in log.read_text()
    assert not survivors(everyone)
    rows = [row for row in metrics(tmp_path / "team") if "loss" in row]
    assert all(row["mismatch/abs_max"] < 1e-4 and row["grad_norm"] > 0 for row in rows)
    saved = complete_checkpoints(tmp_path / "team" / "checkpoints")[-1]
    alone = ["@", str(tmp_path / "team" / "config.toml"), "--resume", "--parallelism.tensor-parallel-size", "1"]
    steps = int(saved.name.removeprefix("step_"))
    done = subprocess.run(command(*alone, "--max-steps", str(steps + 1)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = metrics(tmp_path / "team")[-1]
    assert last["step"] == steps + 1 and last["mismatch/abs_max"] < 1e-4


def test_a_lost_rank_ends_the_run_naming_it(tmp_path: Path):
    log = tmp_path / "log"
    args = ["--parallelism.data-parallel-size", "2", "--max-steps", "1000"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(*RECIPE, *SMALL, *args, "--output-dir", str(tmp_path), "--run-name", "team"),
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + 180
    while "step    1" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    everyone = family(psutil.Process(process.pid))
    (rank,) = [p for p in everyone[1:] if p.cmdline()[1:3] == ["-m", "trainer.grpo"]]
    os.kill(rank.pid, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "error: trainer rank 1 ended with exit code -9" in log.read_text()
    assert not survivors(everyone)


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_the_run_however_it_ends(tmp_path: Path, how: str):
    log = tmp_path / "log"
    with log.open("wb") as file:
        args = [*RECIPE, *SMALL, "--max-steps", "1000", "--output-dir", str(tmp_path), "--run-name", "cut"]
        process = subprocess.Popen(command(*args), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while "step    2" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        everyone = family(psutil.Process(process.pid))
        assert len(everyone) >= 5, "controller, bridge, vLLM, its engine, environment server"
        process.send_signal(getattr(signal, how))
        process.wait(60)
        if how == "SIGINT":
            assert process.returncode == 130
            assert "checkpoint saved" in log.read_text()
            assert f"python -m trainer.grpo @ {tmp_path / 'cut' / 'config.toml'} --resume" in log.read_text()
            assert "Traceback" not in log.read_text()
        assert not survivors(everyone)
        shared = [
            path for path in Path("/dev/shm").glob("vf-grpo-weights-*") if _owner(path) in {p.pid for p in everyone}
        ]
        assert not shared
    finally:
        if process.poll() is None:
            process.kill()


def survivors(processes: list[psutil.Process], seconds: float = 30.0) -> dict[int, str]:
    """Command lines of those that still run after `seconds`."""
    commands = {}
    for process in psutil.wait_procs(processes, timeout=seconds)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                commands[process.pid] = " ".join(process.cmdline())
    return commands


def _owner(path: Path) -> int:
    return int(path.name.removeprefix("vf-grpo-weights-").split("-")[0])


def test_adapters_train_and_travel_alone_and_the_engine_serves_them_exactly(tmp_path: Path):
    settings = ["--lora.rank", "4", "--learning-rate", "3e-3", "--max-steps", "3", "--zero-spread.rule", "resample"]
    settings += ["--truncation.rule", "mask", "--loss.old-policy", "decoupled", "--advantage.kind", "rloo"]
    done = train(*settings, "--output-dir", str(tmp_path), "--run-name", "lora")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(tmp_path / "lora") if "loss" in row]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/abs_max"] < 1e-4 and row["grad_norm"] > 0 for row in rows)
    before = load_file(tiny_model_dir() / "model.safetensors")
    after = load_file(tmp_path / "lora" / "checkpoints" / "step_000003" / "model.safetensors")
    assert before.keys() == after.keys()
    assert (before["model.embed_tokens.weight"] == after["model.embed_tokens.weight"]).all()
    assert any((before[name] != after[name]).any() for name in before if "proj" in name)


def test_an_engine_that_dies_comes_back_with_the_current_weights_and_the_run_goes_on(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        args = [*RECIPE, *SMALL, "--max-steps", "30", "--output-dir", str(tmp_path), "--run-name", "dead"]
        process = subprocess.Popen(command(*args), stdout=file, stderr=file)
    deadline = time.monotonic() + 120
    while "step    2" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    everyone = family(psutil.Process(process.pid))
    (server,) = [p for p in everyone if "vllm.entrypoints.openai.api_server" in " ".join(p.cmdline())]
    os.kill(server.pid, signal.SIGKILL)
    assert process.wait(120) == 0, log.read_text()
    rows = [row for row in metrics(tmp_path / "dead") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert all(row["mismatch/abs_max"] < 1e-4 for row in rows), "it samples from the weights it should have"
    assert "is lost: vLLM server ended with exit code -9" in (tmp_path / "dead" / "logs" / "bridge.log").read_text()
    assert not survivors(everyone)


def test_a_dead_bridge_ends_the_run_with_its_log(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        args = [*RECIPE, *SMALL, "--max-steps", "1000", "--output-dir", str(tmp_path), "--run-name", "dead"]
        process = subprocess.Popen(command(*args), stdout=file, stderr=file)
    deadline = time.monotonic() + 120
    while "step    1" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    everyone = family(psutil.Process(process.pid))
    (bridge_process,) = [p for p in everyone if p.cmdline()[1:4] == ["-m", "bridge", "serve"]]
    os.kill(bridge_process.pid, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "error: " in log.read_text() and "bridge ended with exit code" in log.read_text()
    assert not survivors(everyone)


def test_a_damaged_weight_update_ends_the_run_naming_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write = bridge.transfer.write_file

    def write_damaged(tensors: Any, path: Path) -> int:
        named = dict(tensors)
        size = write(named, path)
        if path.stem == "2":
            damaged = {name: tensor.detach().clone() for name, tensor in named.items()}
            damaged["model.layers.1.mlp.up_proj.weight"] += 0.01
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            save_file(damaged, path, metadata=metadata)
        return size

    monkeypatch.setattr(bridge.transfer, "write_file", write_damaged)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    args = [*RECIPE, *SMALL, "--max-steps", "3", "--output-dir", str(tmp_path), "--run-name", "damaged"]
    monkeypatch.setattr(sys, "argv", ["grpo", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "weight update to version 2" in str(ended.value.code)
    assert "'model.layers.1.mlp.up_proj.weight': its bytes differ" in str(ended.value.code)
    assert [row["step"] for row in metrics(tmp_path / "damaged")] == [1]
    started = {p.pid for p in psutil.Process().children(recursive=True)} - before
    # Python's own helpers belong to this process and end with it.
    own = ("resource_tracker", "forkserver")
    assert not [pid for pid in started if not any(name in " ".join(psutil.Process(pid).cmdline()) for name in own)]
