"""A real pretrained model on real problems, through the whole loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("SMOLLM2_DIR", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(not FOLDER, reason="SMOLLM2_DIR names no model; make one with tests/build_smollm2.py"),
]


@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 2e-5, 1e-4), ("bfloat16", 0.05, 1.0)])
def test_a_pretrained_model_trains_on_gsm8k_and_engine_and_trainer_agree(
    tmp_path: Path, dtype: str, mean: float, largest: float
):
    args = ["--env", "dapo-math", "@", "configs/smollm2_cpu.toml", "--model", FOLDER, "--dtype", dtype]
    args += ["--max-steps", "2", "--output-dir", str(tmp_path), "--run-name", "run", "--sampling.max-tokens", "64"]
    command = [sys.executable, "-m", "trainer.grpo", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [1, 2]
    for step in steps:
        assert 0 < step["mismatch/abs_mean"] < mean
        assert step["mismatch/abs_max"] < largest
        assert step["response_length/mean"] > 10 and step["grad_norm"] >= 0
