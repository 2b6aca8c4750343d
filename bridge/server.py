"""The HTTP side of the bridge: forwards requests to vLLM, captures what was sampled, takes weight updates."""

import json
import logging
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bridge.capture import CaptureStore, calls_from
from bridge.config import BridgeConfig
from bridge.dialects import DIALECTS, Dialect
from bridge.engine import Engine
from bridge.protocol import SESSION_HEADER, BridgeError
from bridge.weights import VersionGate, WeightDirectory, update_engines

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 64 * 2**20


class Bridge:
    """The request handlers and what they share: one engine, one gate, one store of captured calls."""

    def __init__(self, config: BridgeConfig, engine: Engine, directory: WeightDirectory) -> None:
        self.config, self.engine, self.directory = config, engine, directory
        self.gate = VersionGate(config.version)
        self.store = CaptureStore(config.max_captured_calls)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[_errors_as_json])
        for path in DIALECTS:
            app.router.add_post(f"/{path}", self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/bridge/info", self.info)
        app.router.add_post("/bridge/calls", self.take_calls)
        app.router.add_post("/bridge/weights", self.load_weights)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Forward one generation request and capture its answer, whatever the dialect."""
        queued = time.time()
        dialect = DIALECTS[request.path.lstrip("/")](await _json_body(request))
        body = dialect.prepare()
        session = request.headers.get(SESSION_HEADER) or f"anonymous-{uuid.uuid4().hex}"
        index = self.store.next_index(session)
        timeout = aiohttp.ClientTimeout(total=self.config.request_timeout)
        async with (
            self.gate.request() as version,
            self.engine.session.post(f"{self.engine.url}/{dialect.path}", json=body, timeout=timeout) as upstream,
        ):
            if upstream.status != 200:
                answer = web.Response(body=await upstream.read(), status=upstream.status)
                answer.content_type = upstream.content_type
                return answer
            if upstream.content_type == "text/event-stream":
                response, first_token = await self._relay_stream(request, dialect, upstream)
            else:
                answer = await upstream.json()
                first_token = time.time()
                dialect.read(answer)
                response = web.json_response(dialect.restore(answer))
            for call in calls_from(
                dialect, session=session, index=index, version=version, queued=queued, first_token=first_token
            ):
                self.store.add(call)
        return response

    async def _relay_stream(
        self, request: web.Request, dialect: Dialect, upstream: aiohttp.ClientResponse
    ) -> tuple[web.StreamResponse, float]:
        """Pass a server-sent event stream on, line by line; returns the time of its first chunk."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first_token = 0.0
        async for line in upstream.content:
            data = line.strip().removeprefix(b"data: ")
            if line.startswith(b"data: ") and data != b"[DONE]":
                first_token = first_token or time.time()
                chunk = json.loads(data)
                dialect.read(chunk)
                line = b"data: " + json.dumps(dialect.restore(chunk)).encode() + b"\n"
            await response.write(line)
        await response.write_eof()
        return response, first_token

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(await self.engine.get("/v1/models"))

    async def health(self, request: web.Request) -> web.Response:
        alive = self.engine.child.running
        return web.json_response({"status": "ok" if alive else "engine down"}, status=200 if alive else 503)

    async def info(self, request: web.Request) -> web.Response:
        """What a trainer needs to know: versions, names, and the shared-memory folder that weights travel through."""
        return web.json_response(
            {
                "version": self.gate.version,
                "in_flight": self.gate.in_flight,
                "model": self.engine.config.served_name or self.engine.config.model,
                "vllm": self.engine.version,
                "weights_dir": str(self.directory.path),
                "captured_calls": self.store.size,
                "dropped_calls": self.store.dropped,
            }
        )

    async def take_calls(self, request: web.Request) -> web.Response:
        """Hand out, and forget, the captured calls of the sessions named in `{"sessions": [...]}`."""
        taken = self.store.take((await _json_body(request))["sessions"])
        return web.json_response({session: [asdict(call) for call in calls] for session, calls in taken.items()})

    async def load_weights(self, request: web.Request) -> web.Response:
        """Put the weights in `{"path": ..., "version": ...}` into the engine once requests in flight have ended."""
        body = await _json_body(request)
        path, version = Path(body["path"]), int(body["version"])
        if self.directory.path not in path.parents or not path.is_file():
            raise BridgeError(f"weights must be a file in {self.directory.path}, got {path}")
        start = time.monotonic()
        async with self.gate.update(version, self.config.drain_timeout):
            drained = time.monotonic()
            await update_engines([self.engine], path, version)
        seconds = {"drain": drained - start, "update": time.monotonic() - drained}
        logger.info("weights of version %d served after %.3f s", version, sum(seconds.values()))
        return web.json_response({"version": version, "seconds": seconds})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """OpenAI's error object for everything that goes wrong here."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        paths = ", ".join(f"/{path}" for path in [*DIALECTS, "v1/models", "health"])
        return _error(404, f"no such route: {request.path}; the bridge serves {paths}")
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except BridgeError as error:
        status = 500 if request.path.startswith("/bridge/") else 400
        return _error(status, str(error))
    except TimeoutError:
        return _error(504, "the engine did not answer within request_timeout")
    except aiohttp.ClientError as error:
        return _error(502, f"the engine could not be reached: {error}")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "bridge_error", "code": status}}, status=status)


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise BridgeError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BridgeError("the request body must be a JSON object")
    return body
