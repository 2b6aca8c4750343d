"""A proxy in front of a vLLM server that answers some generation requests as a broken one would."""

import contextlib
import random
import re
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

FAULTS = ("close", "cut", "error", "no record", "damaged record", "noise")


class FaultyProxy:
    """`faults` of the next generation requests go wrong; the rest passes unharmed."""

    def __init__(self, target: str, seed: int) -> None:
        self.target, self.faults, self.done = target, 0, 0
        self.random = random.Random(seed)
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FaultyProxy"]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as self.session:
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        try:
            async with self.session.request(
                request.method, f"{self.target}{request.path_qs}", data=body or None, headers=headers
            ) as upstream:
                data = await upstream.read()
        except aiohttp.ClientError:
            return self._close(request)
        status = upstream.status
        if self.faults and request.headers.get("X-Bridge-Call", "probe") != "probe" and status == 200:
            self.faults -= 1
            self.done += 1
            fault = self.random.choice(FAULTS)
            if fault == "close":
                return self._close(request)
            if fault == "cut":
                data = data[: len(data) // 3]
            elif fault == "error":
                status, data = 500, b'{"error": {"message": "boom"}}'
            elif fault == "no record":
                data = re.sub(rb"\x1e[^\x1e]*\x1e", b"", data)
            elif fault == "damaged record":
                data = data.replace(b'"logprobs":[-', b'"logprobs":[', 1).replace(b"prompt_ids", b"prompt_idz")
            else:
                data = self.random.randbytes(200)
        answer = web.Response(body=data, status=status)
        answer.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
        return answer

    @staticmethod
    def _close(request: web.Request) -> web.Response:
        if request.transport:
            request.transport.abort()
        return web.Response(status=502)
