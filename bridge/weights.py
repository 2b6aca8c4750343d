"""Publishing weights: the gate between requests and updates, the file that weights travel in, the update itself."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from bridge.engine import Engine
from bridge.protocol import BridgeError

_PREFIX = "vf-grpo-weights-"


class VersionGate:
    """Requests pass while a policy version is served; an update closes the gate, drains it and opens it at the next.

    So every token of a request that passed was sampled by the one version the gate showed when it entered.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.in_flight = 0
        self._open = asyncio.Event()
        self._open.set()
        self._drained = asyncio.Event()
        self._drained.set()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Enter as a request, waiting while an update runs; gives the policy version."""
        while not self._open.is_set():
            await self._open.wait()
        self.in_flight += 1
        self._drained.clear()
        try:
            yield self.version
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._drained.set()

    @contextlib.asynccontextmanager
    async def update(self, version: int, timeout: float) -> AsyncIterator[None]:
        """Hold new requests, wait for those in flight, and open at `version` when the body succeeds.

        Raises:
            BridgeError: `version` is not newer, another update runs, or the drain takes longer than `timeout` seconds.
        """
        if version <= self.version:
            raise BridgeError(f"weights of version {version} cannot replace version {self.version}: versions only rise")
        if not self._open.is_set():
            raise BridgeError(f"version {version} was published while another update was under way")
        self._open.clear()
        try:
            try:
                await asyncio.wait_for(self._drained.wait(), timeout)
            except TimeoutError as error:
                raise BridgeError(
                    f"update to version {version}: {self.in_flight} requests were still running after {timeout:.0f} s"
                ) from error
            yield
            self.version = version
        finally:
            self._open.set()


class WeightDirectory:
    """A folder in shared memory through which weights travel. It ends with its owner; those of dead owners end here."""

    def __init__(self) -> None:
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        for stale in root.glob(f"{_PREFIX}*"):
            owner = stale.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(stale, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


async def update_engines(engines: Sequence[Engine], path: Path, version: int) -> None:
    """Load the safetensors file at `path` into every engine and drop the prefix caches.

    Raises:
        BridgeError: an engine refused the weights; the message names engine and tensor.
    """
    results = await asyncio.gather(
        *(engine.collective_rpc("bridge_load_weights", path=str(path)) for engine in engines)
    )
    for number, workers in enumerate(results):
        for result in workers:
            if "error" in result:
                raise BridgeError(
                    f"weight update to version {version} stopped at engine {number}, tensor {result['tensor']!r}: "
                    f"{result['error']}"
                )
    await asyncio.gather(*(_reset_prefix_cache(engine) for engine in engines))


async def _reset_prefix_cache(engine: Engine, timeout: float = 30.0) -> None:
    # vLLM frees the blocks of a finished request a moment after it answered; until then a reset fails.
    deadline = time.monotonic() + timeout
    while not (await engine.post("/reset_prefix_cache"))["success"]:
        if time.monotonic() > deadline:
            raise BridgeError(f"the prefix cache of {engine.url} could not be reset within {timeout:.0f} s")
        await asyncio.sleep(0.01)


def write_weights(tensors: Iterable[tuple[str, "object"]], path: Path) -> int:
    """Write named torch tensors with their checksums to `path`; returns the bytes written."""
    import torch
    from safetensors.torch import save_file

    from bridge.vllm_extension import checksum

    on_cpu = {}
    for name, tensor in tensors:
        assert isinstance(tensor, torch.Tensor)
        on_cpu[name] = tensor.detach().cpu().contiguous()
    save_file(on_cpu, path, metadata={name: checksum(tensor) for name, tensor in on_cpu.items()})
    return path.stat().st_size
