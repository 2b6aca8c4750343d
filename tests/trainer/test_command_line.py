"""Wrong input: one clear message, a non-zero exit, no traceback, nothing started."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main, read_config

RECIPE = ["@", "configs/tiny_cpu.toml"]


def run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--env", "no-such-env"], "environment 'no-such-env' is not installed (installed: dapo-math)"),
        (["--env", "no-such-env"], "pip install no-such-env"),
        (["--model", "/no/such/model"], "model '/no/such/model' does not exist"),
        (["--model", "configs"], "holds no config.json"),
        (["--taskset.dataset", "/no/such/file.jsonl"], "dataset file /no/such/file.jsonl does not exist"),
        (["--taskset.dataset", "nonsense"], "dataset 'nonsense' is neither one of"),
        (["--taskset.datset", "gsm8k"], "no setting taskset.datset; did you mean 'dataset'?"),
        (["--learning-rat", "1"], "no setting 'learning_rat' here; did you mean 'learning_rate'?"),
        (["--optimizer.beta", "1"], "no setting 'beta' here; did you mean 'betas'?"),
        (["--bridge.engine.dtyp", "float32"], "no setting 'dtyp' here; did you mean 'dtype'?"),
        (["--samples-per-prompt", "1"], "greater than or equal to 2"),
        (["--sampling.top-p", "0.9"], "sampling.top_p = 0.9 cannot be trained on"),
        (["--sampling.top-k", "20"], "sampling.top_k = 20 cannot be trained on"),
        (["--sampling.max-tokens", "500"], "leaves no room for a prompt"),
        (["--resume", "--output-dir", "/nonexistent"], "nothing to resume"),
        (["--env-config", "nowhere.toml"], "env_config file 'nowhere.toml' does not exist"),
    ],
)
def test_wrong_input_to_training_gets_one_clear_message(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    output = [] if "--output-dir" in args else ["--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["grpo", *RECIPE, *args, *output])
    with pytest.raises(SystemExit) as exit_:
        main()
    # An exit "code" that is text goes to standard error, and the exit code is 1.
    code = exit_.value.code
    said = " ".join(f"{''.join(capsys.readouterr())} {code}".replace("│", " ").split())
    assert code == 1 or isinstance(code, str)
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir()), "a refused run must leave no folder"


def test_a_bad_row_of_a_data_file_is_named(tmp_path: Path):
    rows = [{"problem": "1 + 1 = ?", "answer": "2"}, {"problem": "2 + 2 = ?"}]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("trainer.grpo", *RECIPE, "--taskset.dataset", str(path), "--output-dir", str(tmp_path / "out"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{path} row 2 (id problems/2): no column 'answer'" in done.stderr


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("bridge", "serve", "trainer/assets/tiny", "--port", str(port))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in done.stderr


def test_the_bridge_refuses_a_model_folder_that_does_not_exist():
    done = run("bridge", "serve", "/no/such/model", "--port", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "model folder '/no/such/model' does not exist" in done.stderr


def test_help_documents_every_setting():
    done = run("trainer.grpo", "--help")
    assert done.returncode == 0
    for word in ("--learning-rate", "--sampling.temperature", "Episodes per group", "Peak learning rate"):
        assert word in done.stdout


def test_without_a_recipe_one_is_chosen_and_said(tmp_path: Path):
    done = run("trainer.grpo", "--env", "no-such-env", "--output-dir", str(tmp_path))
    assert "recipe tiny_cpu: no GPU found. Choose another with `@" in done.stdout


def test_a_recipe_with_engine_settings_still_takes_a_free_port(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["grpo"])
    assert read_config(RECIPE).bridge.port == 0
