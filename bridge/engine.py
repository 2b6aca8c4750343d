"""Starting, watching and speaking to one vLLM server."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import aiohttp

from bridge.config import EngineConfig
from bridge.processes import Child, free_port
from bridge.protocol import BridgeError

_EXTENSION = "bridge.vllm_extension.WeightExtension"


def on_gpu() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def server_command(config: EngineConfig, port: int) -> list[str]:
    """The command line of a vLLM server whose logprobs are those of the sampling distribution."""
    eager = config.enforce_eager if config.enforce_eager is not None else not on_gpu()
    command = [config.python, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", config.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", config.served_name or config.model]
    command += ["--dtype", config.dtype, "--seed", str(config.seed)]
    command += ["--max-num-seqs", str(config.max_num_seqs)]
    if config.max_model_len:
        command += ["--max-model-len", str(config.max_model_len)]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    # A checkpoint's generation_config.json may narrow the sampling support (top_k, top_p): requests alone decide here.
    command += ["--generation-config", "vllm"]
    command += ["--worker-extension-cls", _EXTENSION, "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    if eager:
        command.append("--enforce-eager")
    if not on_gpu():
        # A worker process of its own costs more in hand-over than a CPU model in one process gains.
        command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    return command + config.extra_args


def server_environment(config: EngineConfig) -> dict[str, str]:
    # The package may be used from its source folder: the server's interpreter must find `bridge` there too.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /pause, /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if not on_gpu():
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(config.kv_cache_gib or 1)))
        if config.cpu_threads:
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.cpu_threads)}
    return env


class Engine:
    """One running vLLM server: where it is, whether it lives, and its control calls."""

    def __init__(self, config: EngineConfig, child: Child, url: str, session: aiohttp.ClientSession) -> None:
        self.config, self.child, self.url, self.session = config, child, url, session
        self.version = ""

    @classmethod
    async def start(cls, config: EngineConfig, session: aiohttp.ClientSession, log: Path | None) -> "Engine":
        """Start a server and wait until it answers.

        Raises:
            BridgeError: no such model folder, or the server ended or did not answer in time; the log's end is quoted.
        """
        looks_local = config.model.startswith((".", "/", "~")) or config.model.count("/") > 1
        if not config.model or (looks_local and not Path(config.model).expanduser().is_dir()):
            raise BridgeError(f"model folder {config.model!r} does not exist; name a folder in Hugging Face format")
        port = free_port()
        command, env = server_command(config, port), server_environment(config)
        child = await Child.start("vLLM server", command, log, env)
        engine = cls(config, child, f"http://127.0.0.1:{port}", session)
        try:
            await engine._wait_until_ready()
            engine.version = (await engine.get("/version"))["version"]
        except BaseException:
            await child.stop()
            raise
        return engine

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        while time.monotonic() < deadline:
            if not self.child.running:
                raise BridgeError(self.child.failure())
            try:
                await self.get("/health")
                return
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.2)
        raise BridgeError(
            f"the vLLM server did not answer within engine.start_timeout = {self.config.start_timeout:.0f} s; "
            f"last lines:\n{self.child.tail()}"
        )

    async def get(self, path: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=10)
        async with self.session.get(self.url + path, timeout=timeout, raise_for_status=True) as response:
            return await response.json(content_type=None)

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """A control call.

        Raises:
            BridgeError: the server refused it or did not answer within `timeout` seconds.
        """
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self.session.post(self.url + path, json=body, timeout=limit) as response:
                text = await response.text()
                if response.status != 200:
                    raise BridgeError(f"vLLM answered {response.status} to {path}: {text[:500]}")
                return await response.json(content_type=None) if text else None
        except TimeoutError as error:
            raise BridgeError(f"vLLM did not answer {path} within {timeout:.0f} s") from error
        except aiohttp.ClientError as error:
            raise BridgeError(f"vLLM could not be reached for {path}: {error}") from error

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call `method` on every worker of the server; one result each."""
        return (await self.post("/collective_rpc", {"method": method, "kwargs": kwargs}))["results"]

    async def stop(self) -> None:
        await self.child.stop()
