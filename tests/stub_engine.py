"""A server that looks like vLLM to the bridge and answers at once: `python -m tests.stub_engine PORT [VERSION]`.

For tests of routing and for `benchmarks/bridge_overhead.py`, where the engine must cost nothing. It samples token 7
`max_tokens` times; `{"seed": milliseconds}` makes it wait before.
"""

import asyncio
import json
import sys
from typing import Any

from bridge.record import SEPARATOR, Choice, Generation, encode


class StubEngine(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, no more of it than the bridge's client needs."""

    version = "0.32.0"
    weights = 0

    def __init__(self) -> None:
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end]
            length = 0
            if (at := head.lower().find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            self.answer(head.split(b" ", 2)[1].decode(), b"x-bridge-call" in head.lower(), body)

    def answer(self, path: str, recorded: bool, body: bytes) -> None:
        given = json.loads(body or b"{}")
        status, told = 200, b"{}"
        delay = 0.0
        if path == "/version":
            told = json.dumps({"version": self.version}).encode()
        elif path == "/bridge/version":
            type(self).weights = given.get("version", self.weights)
            told = json.dumps({"version": self.weights, "spans": True}).encode()
        elif path == "/bridge/stage":
            told = b'{"workers": [{"staged": 1}]}'
        elif path == "/bridge/commit":
            type(self).weights = given["version"]
        elif path in ("/inference/v1/generate", "/v1/completions"):
            told, delay = self.sample(path, recorded, given)
        elif path not in ("/health", "/bridge/discard", "/v1/models"):
            status, told = 404, b'{"error": {"message": "no such route"}}'
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(told)}\r\n\r\n"
        if delay:
            asyncio.get_running_loop().call_later(delay, self.transport.write, head.encode() + told)
        else:
            self.transport.write(head.encode() + told)

    def sample(self, path: str, recorded: bool, given: dict[str, Any]) -> tuple[bytes, float]:
        sampling = given.get("sampling_params", given)
        count = sampling.get("max_tokens", 1)
        ids, logprobs = [7] * count, [-0.5] * count
        if path == "/v1/completions":
            answer: Any = {"choices": [{"index": 0, "text": "7" * count, "finish_reason": "length"}]}
        else:
            content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
            choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
            answer = {"choices": [choice]}
        told = json.dumps(answer).encode()
        if recorded:
            prompt = given.get("token_ids", [1, 2])
            spans = [(self.weights, 0, count)]
            record = [Generation(prompt, {"temperature": 1.0}, 1.0, [Choice(0, ids, logprobs, "length", spans)])]
            told = SEPARATOR + encode(record) + SEPARATOR + told
        return told, sampling.get("seed", 0) / 1000


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(StubEngine, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        StubEngine.version = sys.argv[2]
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(int(sys.argv[1])))
    else:
        uvloop.run(main(int(sys.argv[1])))
