"""Settings of the bridge and of the vLLM server behind it."""

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_config import BaseConfig


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """An end for an error message that names the nearest of `known`, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


class Settings(BaseConfig):
    """A config class whose error for an unknown key names the nearest known one, at any depth."""

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if str(key).replace("-", "_") not in cls.model_fields:
                raise ValueError(f"there is no setting {key!r} here; {did_you_mean(str(key), cls.model_fields)}")
        return data


class EngineConfig(Settings):
    """How one vLLM server is started."""

    model: str = ""
    """Folder in Hugging Face format, or a hub id."""
    served_name: str | None = None
    """Model name that clients use; the value of `model` where unset."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Computation type of the engine. `float32` makes engine and trainer agree to 1e-4."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion in tokens; the model's own limit where unset."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Sequences decoded at once."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache size in GiB; unset, 1 GiB on CPU and vLLM's own choice on GPU."""
    cpu_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine's matrix products; unset, one a core. Small models are fastest with 1."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs. Unset: true on CPU, false on GPU."""
    seed: int = 0
    """Engine seed, for requests that bring none."""
    python: str = sys.executable
    """Interpreter that starts the server; another one may hold another vLLM version."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds until the server must answer."""
    extra_args: list[str] = Field(default_factory=list)
    """Further `vllm serve` arguments, appended as they are."""


class BridgeConfig(Settings):
    """The bridge's own settings; `engine` holds the server's."""

    engine: EngineConfig = EngineConfig()
    version: int = Field(default=0, ge=0)
    """Policy version of the weights that the engine starts with."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback opens the weights and every captured token to that network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0 takes a free one and prints it."""
    log_dir: Path | None = None
    """Folder for `vllm_0.log`; unset, the server's output goes to standard error."""
    ready_file: Path | None = None
    """Written with the base URL once requests are served, for a parent process that waits for it."""
    max_captured_calls: int = Field(default=100_000, ge=1)
    """Captured calls kept for pick-up; the oldest are dropped (and counted) beyond that."""
    drain_timeout: float = Field(default=600.0, gt=0)
    """Seconds a weight update waits for requests in flight."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """Seconds one request may take inside the engine."""
