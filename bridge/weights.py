"""Publishing weights to every replica, or to none: stage and check while the old ones serve, then switch."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from bridge.config import BridgeConfig
from bridge.engine import Engine
from bridge.gate import Mode, VersionGate
from bridge.observe import Metrics
from bridge.pool import Pool, Replica, Stale
from bridge.protocol import BridgeError
from bridge.waiting import waiting_for

logger = logging.getLogger("bridge")

_PREFIX = "vf-grpo-weights-"


class Update(BaseModel):
    """One publication, as `POST /bridge/weights` takes it.

    Args:
        version: policy version of the weights.
        mode: what becomes of requests in flight: they finish first (`wait`), go on with the new weights and carry both
            versions (`keep`), or start again (`abort`).
        kind: how the weights travel: `file` in shared memory, `ipc` handles of a GPU's memory, `broadcast` from the
            trainer, or a LoRA `adapter` in a folder.
        arguments: what the worker's `bridge_stage_<kind>` takes.
        replicas: numbers of the replicas that the trainer counts on (`broadcast`: their order makes the ranks).
    """

    version: int = Field(ge=0)
    mode: Mode = "wait"
    kind: Literal["file", "ipc", "broadcast", "adapter"]
    arguments: dict[str, Any]
    replicas: list[int] | None = None


class WeightDirectory:
    """A folder in shared memory through which weights travel. It ends with its owner; those of dead owners end here."""

    def __init__(self) -> None:
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        for stale in root.glob(f"{_PREFIX}*"):
            owner = stale.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(stale, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))

    def contains(self, path: Path) -> bool:
        return self.path in path.parents

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Publisher:
    """Carries out updates, and keeps what a replica that starts later needs of the last one."""

    def __init__(self, config: BridgeConfig, gate: VersionGate, directory: WeightDirectory, metrics: Metrics) -> None:
        self.config, self.gate, self.directory, self.metrics = config, gate, directory, metrics
        self.pool: Pool
        self._current: Update | None = None
        self._handles: list[Any] | None = None
        self._lock = asyncio.Lock()

    async def publish(self, update: Update) -> dict[str, float]:
        """Put weights into every serving replica; requests that enter afterwards are answered by them alone.

        Returns:
            Seconds: `stage` (the old weights still served), `drain`, `commit` (nothing served).

        Raises:
            BridgeError: a tensor did not arrive as it was sent (it is named, and the old weights go on serving), or no
                replica could load them.
        """
        async with self._lock:
            same = update.version == self.gate.version
            first = same and self._current is None  # the trainer's own words for what the servers started with
            repair = same and not first and any(r.state == "stale" for r in self.pool.replicas)
            if update.version <= self.gate.version and not (first or repair):
                raise BridgeError(
                    f"weights of version {update.version} cannot replace version {self.gate.version}: "
                    "versions only rise"
                )
            with self._owned(update):
                wanted = ("stale",) if repair else ("serving", "stale")
                replicas = [r for r in self.pool.replicas if r.state in wanted and r.engine]
                self._check_ranks(update, replicas)
                start = time.monotonic()
                replicas = await self._stage(update, replicas)
                staged = time.monotonic()
                mode = self._possible_mode(update, replicas)
                try:
                    async with self.gate.update(update.version, mode, self.config.drain_timeout):
                        drained = time.monotonic()
                        await self._commit(update, replicas, pause=mode == "keep")
                        self._remember(update)
                except BaseException:
                    await self._discard(replicas)
                    raise
            end = time.monotonic()
        seconds = {"stage": staged - start, "drain": drained - staged, "commit": end - drained}
        self.metrics.updated(update.version, sum(seconds.values()))
        logger.info(
            "version %d serves (%s): staged in %.3f s, requests waited %.3f s",
            *(update.version, mode, seconds["stage"], seconds["drain"] + seconds["commit"]),
        )
        return seconds

    async def give_current(self, engine: Engine, first: bool) -> None:
        """What a server that just started still lacks.

        Raises:
            Stale: it has other weights, and the current ones cannot be had again.
        """
        async with self._lock:
            version, current = self.gate.version, self._current
            if current is None:
                fresh = engine.served_version in (None, 0, version) or (first and engine.child is not None)
                if not fresh:
                    raise Stale(f"it serves version {engine.served_version}, the run is at {version}")
                await engine.serve_version(version)
                return
            arguments = dict(current.arguments)
            if current.kind == "broadcast":
                raise Stale("the trainer holds them")
            if current.kind == "ipc":
                arguments["handles"] = self._handles
            try:
                await self._stage_one(current.kind, arguments, engine)
                await self._commit_one(current, engine, pause=False)
            except BridgeError as error:
                if current.kind == "file":
                    raise
                raise Stale(str(error)) from error

    @contextlib.contextmanager
    def _owned(self, update: Update) -> Iterator[None]:
        """A file that is not served in the end is removed."""
        if update.kind != "file":
            yield
            return
        path = Path(update.arguments["path"])
        if not self.directory.contains(path) or not path.is_file():
            raise BridgeError(f"weights must be a file in {self.directory.path}, got {path}")
        try:
            yield
        finally:
            if self._current is not update:
                path.unlink(missing_ok=True)

    def _remember(self, update: Update) -> None:
        if self._current and self._current.kind == "file":
            Path(self._current.arguments["path"]).unlink(missing_ok=True)
        if update.kind == "ipc" and update.arguments.get("handles"):
            self._handles = update.arguments["handles"]
        self._current = update

    def _check_ranks(self, update: Update, replicas: list[Replica]) -> None:
        numbers = [replica.number for replica in replicas]
        if update.replicas is not None and update.replicas != numbers:
            raise BridgeError(f"the update was made for replicas {update.replicas}, but {numbers} are there: try again")
        if not replicas:
            raise BridgeError(f"no replica is there to take version {update.version}")

    def _possible_mode(self, update: Update, replicas: list[Replica]) -> Mode:
        if update.mode == "keep" and not all(replica.engine and replica.engine.spans for replica in replicas):
            return "wait"  # an engine that does not report the version of a token is drained, so that it is known
        return update.mode

    async def _stage(self, update: Update, replicas: list[Replica]) -> list[Replica]:
        """Bring the weights into every replica beside the old ones; returns the replicas that have them."""
        rank, calls = 1, []
        for replica in replicas:
            assert replica.engine is not None
            arguments = dict(update.arguments)
            if update.kind == "broadcast":
                arguments["rank"] = rank
                rank += self.config.engine.tensor_parallel_size
            calls.append(self._stage_one(update.kind, arguments, replica.engine))
        results = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [result for result in results if isinstance(result, TensorRefused)]
        if refusals:
            await self._discard(replicas)
            raise BridgeError(f"weight update to version {update.version} stopped: {refusals[0]}")
        return self._survivors(replicas, results, update.version)

    async def _stage_one(self, kind: str, arguments: dict[str, Any], engine: Engine) -> None:
        if kind == "adapter":
            if not Path(arguments["path"], "adapter_config.json").is_file():
                raise TensorRefused(f"{arguments['path']} holds no LoRA adapter")
            return
        body = {"kind": kind, "arguments": arguments}
        timeout = self.config.update_timeout
        call = engine.post("/bridge/stage", body, timeout)
        for result in (await waiting_for(call, f"weights to arrive at {engine.url}"))["workers"]:
            if "error" in result:
                raise TensorRefused(f"tensor {result['tensor']!r}: {result['error']}")

    async def _commit(self, update: Update, replicas: list[Replica], pause: bool) -> None:
        calls = [self._commit_one(update, replica.engine, pause) for replica in replicas if replica.engine]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for replica in self._survivors(replicas, results, update.version):
            if replica.state == "stale":
                self.pool.set_serving(replica)

    async def _commit_one(self, update: Update, engine: Engine, pause: bool) -> None:
        if update.kind == "adapter":
            name, path = update.arguments["name"], update.arguments["path"]
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            await engine.post("/v1/load_lora_adapter", body, self.config.update_timeout)
            await engine.serve_version(update.version)
        else:
            body = {"version": update.version, "pause": pause}
            await engine.post("/bridge/commit", body, self.config.update_timeout)

    def _survivors(self, replicas: list[Replica], results: list[Any], version: int) -> list[Replica]:
        """Replicas whose call succeeded; the others are taken out, for the rest must not wait for them.

        Raises:
            BridgeError: none is left.
        """
        alive = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, BridgeError | TimeoutError):
                self.pool.evict(replica, f"version {version}: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                alive.append(replica)
        if not alive:
            raise BridgeError(f"no replica could load version {version}: {results[0]}")
        return alive

    async def _discard(self, replicas: list[Replica]) -> None:
        calls = [replica.engine.post("/bridge/discard", timeout=30) for replica in replicas if replica.engine]
        await asyncio.gather(*calls, return_exceptions=True)


class TensorRefused(BridgeError):
    """The weights themselves are wrong, so no replica must load them."""
