"""Settings of the bridge and of the vLLM servers behind it."""

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
    """Sequences that one server decodes at once."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one server splits its model over."""
    load_format: str = "auto"
    """Where the first weights come from; `dummy` makes them up, for measurements."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that the server may take; vLLM's default where unset."""
    lora_rank: int = Field(default=0, ge=0, le=512)
    """Largest rank of a LoRA adapter that will be published; 0 serves none."""
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


class EngineServerConfig(EngineConfig):
    """One vLLM server on its own, for a bridge elsewhere (`replica_url`)."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `BRIDGE_TOKEN` in the environment of both sides."""
    port: int = Field(default=8001, ge=1, le=65535)
    """Port to bind."""


class BridgeConfig(Settings):
    """The bridge's own settings; `engine` holds those of each server."""

    engine: EngineConfig = EngineConfig()
    replicas: int = Field(default=1, ge=0)
    """vLLM servers to start on this machine; 0 where `replica_url` names them all."""
    gpus: list[int] = Field(default_factory=list)
    """GPUs for the servers, `tensor_parallel_size` for each in turn; unset, from 0 on."""
    replica_url: list[str] = Field(default_factory=list)
    """Servers that run already, here or elsewhere, started with `python -m bridge engine`. Repeatable."""
    replica_token: str = ""
    """Secret that those servers were started with (`BRIDGE_TOKEN` in their environment)."""
    version: int = Field(default=0, ge=0)
    """Policy version of the weights that the servers start with."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback opens the weights and every captured token to that network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0 takes a free one and prints it."""
    api_key: str = ""
    """Where set, requests must carry it, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""
    max_request_mib: float = Field(default=64.0, gt=0)
    """Largest request body."""
    log_dir: Path | None = None
    """Folder for `vllm_N.log`; unset, the servers' output goes to standard error."""
    ready_file: Path | None = None
    """Written with the base URL once requests are served, for a parent process that waits for it."""
    max_captured_calls: int = Field(default=100_000, ge=1)
    """Captured calls kept for pick-up; the oldest are dropped (and counted) beyond that."""
    capture_dir: Path | None = None
    """Folder to keep every captured call in, as Parquet."""
    max_queued: int = Field(default=4096, ge=0)
    """Requests that may wait for a free replica; more get status 429."""
    request_timeout: float = Field(default=1800.0, gt=0)
    """Seconds one request may take, its waiting and retries included."""
    max_retries: int = Field(default=3, ge=0)
    """How often a request is started again after a replica failed under it."""
    max_restarts: int = Field(default=10, ge=0)
    """How often a replica may be restarted within ten minutes before the bridge gives it up."""
    drain_timeout: float = Field(default=600.0, gt=0)
    """Seconds a weight update waits for requests in flight."""
    update_timeout: float = Field(default=300.0, gt=0)
    """Seconds a replica may take to load published weights before it is taken out."""

    @model_validator(mode="after")
    def _some_replica(self) -> "BridgeConfig":
        if self.replicas + len(self.replica_url) == 0:
            raise ValueError("replicas = 0 needs at least one replica_url")
        needed, given = self.replicas * self.engine.tensor_parallel_size, len(self.gpus)
        if self.gpus and given != needed:
            raise ValueError(
                f"gpus names {given} GPUs, but {self.replicas} replicas of tensor_parallel_size "
                f"{self.engine.tensor_parallel_size} need {needed}"
            )
        return self
