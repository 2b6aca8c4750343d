"""The bridge as a trainer sees it: pick up what was sampled, publish weights, pause and resume, compare logprobs."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec
import numpy as np

from bridge.gate import Mode
from bridge.processes import free_port
from bridge.protocol import BridgeError, ModelCall, Sample
from bridge.sequences import samples_from_calls

if TYPE_CHECKING:
    import torch

Transport = Literal["file", "ipc", "broadcast"]

_decode_calls = msgspec.json.Decoder(dict[str, list[ModelCall]]).decode


class BridgeClient:
    """A connection to one bridge. Use as an asynchronous context manager.

    Args:
        url: the bridge's base URL without `/v1`, such as `http://127.0.0.1:8000`.
        api_key: the bridge's own, where it has one.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._weights_dir: Path | None = None
        self._shared: dict[str, tuple[int, ...]] | None = None

    async def __aenter__(self) -> "BridgeClient":
        self._session = aiohttp.ClientSession(headers=self._headers)
        try:
            self._weights_dir = Path((await self.info())["weights_dir"])
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def info(self) -> dict[str, Any]:
        """Policy version, model name, replicas and their states, requests in flight and queued."""
        return await self._request("GET", "/bridge/info")

    async def take_calls(self, sessions: Sequence[str]) -> dict[str, list[ModelCall]]:
        """Pick up the captured calls of `sessions`; the bridge forgets them."""
        return _decode_calls(await self._fetch("POST", "/bridge/calls", {"sessions": list(sessions)}))

    async def samples(self, idle: float = 5.0, poll: float = 0.5, limit: int = 256) -> AsyncIterator[Sample]:
        """Every captured sequence, as soon as its session has been silent for `idle` seconds; without end.

        A session that speaks again later makes further samples; their `fork` is then empty as well.
        """
        while True:
            answer = await self._fetch("POST", "/bridge/idle-calls", {"idle": idle, "limit": limit})
            sessions = _decode_calls(answer)
            for calls in sessions.values():
                for sample in samples_from_calls(calls):
                    yield sample
            if len(sessions) < limit:
                await asyncio.sleep(poll)

    async def publish(
        self,
        tensors: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]",
        version: int,
        mode: Mode = "wait",
        transport: Transport = "file",
        address: str = "127.0.0.1",
    ) -> dict[str, float]:
        """Put named weights (checkpoint names and shapes) into all running engines as policy `version`.

        Args:
            mode: requests in flight finish first (`wait`), go on with the new weights (`keep`) or start again
                (`abort`).
            transport: `file` goes through shared memory; `ipc` lets engines on the trainer's GPU read its memory, which
                must then stay as it is until this returns; `broadcast` sends over NCCL (gloo for CPU tensors).
            address: this machine, as the engines reach it (`broadcast`).

        Returns:
            Seconds spent: `write` (making ready), `stage` (the old weights still served), `drain` and `commit`.

        Raises:
            BridgeError: the engines refused a tensor, which the message names; the old weights go on serving.
        """
        named: dict[str, torch.Tensor] = dict(tensors)
        start = asyncio.get_running_loop().time()
        if transport == "file":
            return await self._publish_file(named, version, mode, start)
        from bridge import transfer

        expected = await asyncio.to_thread(transfer.sums, named)
        body: dict[str, Any] = {"version": version, "mode": mode, "kind": transport}
        if transport == "ipc":
            pointers = {name: (t.data_ptr(), *t.shape) for name, t in named.items()}
            handles = None if pointers == self._shared else await asyncio.to_thread(transfer.handles_of, named)
            body["arguments"] = {"handles": handles, "expected": expected}
            written = asyncio.get_running_loop().time()
            answer = await self._request("POST", "/bridge/weights", body)
            self._shared = pointers
            return {"write": written - start, **answer["seconds"]}
        info = await self.info()
        replicas = [replica["number"] for replica in info["replicas"] if replica["state"] in ("serving", "stale")]
        world = 1 + len(replicas) * info["tensor_parallel_size"]
        backend = "nccl" if all(t.is_cuda for t in named.values()) else "gloo"
        place = f"{address}:{free_port(address)}"
        body |= {
            "replicas": replicas,
            "arguments": {
                "address": place,
                "world": world,
                "backend": backend,
                "layout": transfer.layout_of(named),
                "expected": expected,
            },
        }
        written = asyncio.get_running_loop().time()
        sending = asyncio.to_thread(transfer.send_broadcast, place, world, backend, named)
        sent, answer = await asyncio.gather(
            sending, self._request("POST", "/bridge/weights", body), return_exceptions=True
        )
        for outcome in (answer, sent):
            if isinstance(outcome, BridgeError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise BridgeError(f"the broadcast of version {version} failed: {outcome}") from outcome
        return {"write": written - start, **answer["seconds"]}  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]

    async def _publish_file(
        self, named: "Mapping[str, torch.Tensor]", version: int, mode: Mode, start: float
    ) -> dict[str, float]:
        from safetensors import SafetensorError

        from bridge.transfer import write_file

        assert self._weights_dir is not None, "use BridgeClient as a context manager"
        path = self._weights_dir / f"{version}.safetensors"
        try:
            await asyncio.to_thread(write_file, named, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise BridgeError(f"the weights could not be written to {self._weights_dir}: {error}") from error
        written = asyncio.get_running_loop().time()
        body = {"version": version, "mode": mode, "kind": "file", "arguments": {"path": str(path)}}
        answer = await self._request("POST", "/bridge/weights", body)
        return {"write": written - start, **answer["seconds"]}

    async def publish_adapter(self, folder: Path, version: int, name: str, mode: Mode = "wait") -> dict[str, float]:
        """Serve a LoRA adapter (a folder as peft writes it) as model `name`, in place of its earlier version.

        Raises:
            BridgeError: no adapter is there, or the engines were started without `engine.lora_rank`.
        """
        arguments = {"name": name, "path": str(folder.resolve())}
        body = {"version": version, "mode": mode, "kind": "adapter", "arguments": arguments}
        return (await self._request("POST", "/bridge/weights", body))["seconds"]

    async def pause(self) -> None:
        """Hold new requests at the bridge; those inside an engine go on."""
        await self._request("POST", "/bridge/pause", {})

    async def resume(self) -> None:
        await self._request("POST", "/bridge/resume", {})

    async def score(self, token_ids: Sequence[int]) -> dict[int, np.ndarray]:
        """What each serving replica's weights say of a sequence: logprob of each token but the first, at temperature
        1, float32 [length - 1]."""
        answer = await self._request("POST", "/bridge/score", {"token_ids": list(token_ids)})
        return {int(number): np.asarray(row, dtype=np.float32) for number, row in answer["replicas"].items()}

    async def verify(self, token_ids: Sequence[int], logprobs: np.ndarray, tolerance: float) -> float:
        """Prove that every replica holds the trainer's weights: its logprobs of a probe sequence are the trainer's.

        Args:
            logprobs: of each token but the first by the trainer's own forward pass, [length - 1].
            tolerance: largest difference allowed.

        Returns:
            The largest difference found.

        Raises:
            BridgeError: a replica's differ more; it is named.
        """
        worst = 0.0
        for number, row in (await self.score(token_ids)).items():
            difference = float(np.abs(row - logprobs).max())
            if not difference <= tolerance:
                raise BridgeError(
                    f"replica {number} does not hold the published weights: its logprobs of the probe sequence differ "
                    f"from the trainer's by up to {difference:.2g} (allowed {tolerance:.2g})"
                )
            worst = max(worst, difference)
        return worst

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return msgspec.json.decode(await self._fetch(method, path, body))

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        assert self._session is not None, "use BridgeClient as a context manager"
        timeout = aiohttp.ClientTimeout(total=1200)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BridgeError(f"the bridge at {self.url} did not answer {path}: {error!r}") from error
        if response.status != 200:
            try:
                message = msgspec.json.decode(answer)["error"]["message"]
            except (msgspec.MsgspecError, KeyError, TypeError):
                message = f"status {response.status}: {answer[:300]!r}"
            raise BridgeError(message)
        return answer
