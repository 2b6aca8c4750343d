import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.tiny import tiny_model_dir

# Tests are functions of their seeds alone, and must not reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def start(command: list[str], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(env or {})})


@contextlib.contextmanager
def serving(model: str | Path, folder: Path, *args: str) -> Iterator[str]:
    """A bridge with a real vLLM behind it, as its user starts it; gives the base URL."""
    folder.mkdir(exist_ok=True)
    ready = folder / "url"
    command = [sys.executable, "-m", "bridge", "serve", str(model), "--port", "0", "--ready-file", str(ready)]
    command += ["--log-dir", str(folder), "--engine.dtype", "float32", "--engine.cpu-threads", "1", *args]
    if python := os.environ.get("VLLM_PYTHON"):  # an interpreter with another vLLM version
        command += ["--engine.python", python]
    process = start(command, folder / "bridge.log")
    try:
        deadline = time.monotonic() + 180
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "bridge.log").read_text()
            time.sleep(0.1)
        yield ready.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="session")
def bridge_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One bridge with the tiny model for all tests that leave its weights alone."""
    with serving(tiny_model_dir(), tmp_path_factory.mktemp("bridge"), "--engine.max-model-len", "256") as url:
        yield url


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The shipped model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_model_dir()
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def forward_logprobs(model: Any, prompt_ids: list[int], completion_ids: list[int], temperature: float = 1.0) -> Any:
    """What a float32 transformers forward pass says of sampled tokens, [completion length]."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1]
    return logprobs.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)
