"""The bridge as a trainer sees it: pick up captured calls, publish weights."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from bridge.protocol import BridgeError, ModelCall
from bridge.weights import write_weights

if TYPE_CHECKING:
    import torch


class BridgeClient:
    """A connection to one bridge. Use as an asynchronous context manager.

    Args:
        url: the bridge's base URL without `/v1`, such as `http://127.0.0.1:8000`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._weights_dir: Path | None = None

    async def __aenter__(self) -> "BridgeClient":
        self._session = aiohttp.ClientSession()
        self._weights_dir = Path((await self.info())["weights_dir"])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def info(self) -> dict[str, Any]:
        """Policy version, model name, vLLM version, requests in flight."""
        return await self._request("GET", "/bridge/info")

    async def take_calls(self, sessions: Sequence[str]) -> dict[str, list[ModelCall]]:
        """Pick up the captured calls of `sessions`; the bridge forgets them."""
        answer = await self._request("POST", "/bridge/calls", {"sessions": list(sessions)})
        return {session: [ModelCall.from_dict(call) for call in calls] for session, calls in answer.items()}

    async def publish(self, tensors: Iterable[tuple[str, "torch.Tensor"]], version: int) -> dict[str, float]:
        """Put named weights (checkpoint names and shapes) into the running engines as policy `version`.

        Returns:
            Seconds spent: `write` (into shared memory), `drain` (requests in flight), `update` (inside the engine).

        Raises:
            BridgeError: the engine refused a tensor, which the message names; the old weights go on serving.
        """
        assert self._weights_dir is not None, "use BridgeClient as a context manager"
        path = self._weights_dir / f"{version}.safetensors"
        start = asyncio.get_running_loop().time()
        try:
            await asyncio.to_thread(write_weights, tensors, path)
            written = asyncio.get_running_loop().time()
            answer = await self._request("POST", "/bridge/weights", {"path": str(path), "version": version})
        finally:
            path.unlink(missing_ok=True)
        return {"write": written - start, **answer["seconds"]}

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        assert self._session is not None, "use BridgeClient as a context manager"
        timeout = aiohttp.ClientTimeout(total=1200)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BridgeError(f"the bridge at {self.url} did not answer {path}: {error!r}") from error
        if response.status != 200:
            raise BridgeError(answer["error"]["message"])
        return answer
