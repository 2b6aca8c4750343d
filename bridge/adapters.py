"""What differs between vLLM versions, one small class each; everything else of vLLM is used as it is.

| | 0.26 | 0.32 | 0.33 |
|---|---|---|---|
| `/inference/v1/generate` | served | only with `--enable-scale-out` | as 0.32 |
| its logprobs | `{"token": "token_id:N"}` | `{"token_id": N}` | as 0.32 |
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from bridge.protocol import BridgeError


class Adapter:
    """One vLLM minor version, and the flags that its server needs."""

    minor: str
    flags: tuple[str, ...]

    def generate_answer(self, body: bytes) -> bytes:
        """An answer of `/inference/v1/generate` in the shape that `renderers` (Verifiers' TrainClient) reads:
        `{"token": "token_id:N", "logprob": x}`."""
        return body


class Vllm026(Adapter):
    minor = "0.26"
    flags = ("--return-tokens-as-token-ids",)


class Vllm032(Adapter):
    minor = "0.32"
    flags = ("--enable-scale-out",)

    def generate_answer(self, body: bytes) -> bytes:
        answer: dict[str, Any] = msgspec.json.decode(body)
        for choice in answer.get("choices") or []:
            for entry in (choice.get("logprobs") or {}).get("content") or []:
                if "token_id" in entry:
                    entry["token"] = f"token_id:{entry.pop('token_id')}"
        return msgspec.json.encode(answer)


class Vllm033(Vllm032):
    minor = "0.33"


ADAPTERS = (Vllm026(), Vllm032(), Vllm033())


def adapter_for(version: str) -> tuple[Adapter, bool]:
    """The adapter for a vLLM version, and whether that version is a known one; for all others it is the newest."""
    minor = ".".join(version.split(".")[:2])
    for adapter in ADAPTERS:
        if adapter.minor == minor:
            return adapter, True
    return ADAPTERS[-1], False


def refusal(version: str, reason: str) -> BridgeError:
    """What to tell the user of a server whose probe failed."""
    known = known_versions()
    if adapter_for(version)[1]:
        return BridgeError(f"the vLLM {version} server does not answer as the bridge needs: {reason}")
    return BridgeError(f"vLLM {version} is unknown to the bridge and its probe failed: {reason}; known are {known}")


def known_versions(adapters: Iterable[Adapter] = ADAPTERS) -> str:
    return ", ".join(f"{adapter.minor}.x" for adapter in adapters)
