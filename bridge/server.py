"""The HTTP side of the bridge: its routes, who may use them, and errors in the shape that clients know."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from pydantic import ValidationError

from bridge.capture import CaptureStore
from bridge.config import BridgeConfig
from bridge.gate import VersionGate
from bridge.observe import Metrics
from bridge.pool import Overloaded, Pool
from bridge.protocol import BridgeError
from bridge.relay import GENERATION_ROUTES, AttemptFailed, Relay
from bridge.weights import Publisher, Update, WeightDirectory

logger = logging.getLogger("bridge")

_PASSED_ON = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_OPEN_ROUTES = ("/health",)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Bridge:
    """The request handlers and what they share."""

    def __init__(
        self,
        config: BridgeConfig,
        pool: Pool,
        gate: VersionGate,
        store: CaptureStore,
        publisher: Publisher,
        directory: WeightDirectory,
        metrics: Metrics,
    ) -> None:
        self.config, self.pool, self.gate, self.store = config, pool, gate, store
        self.publisher, self.directory, self.metrics = publisher, directory, metrics

    def application(self) -> web.Application:
        size = int(self.config.max_request_mib * 2**20)
        app = web.Application(client_max_size=size, middlewares=[_errors_as_json, self._authorized])
        relay = Relay(self.config, self.pool, self.gate, self.store, self.metrics)
        for route in GENERATION_ROUTES:
            app.router.add_post(f"/{route}", relay.__call__)
        for path in _PASSED_ON:
            app.router.add_post(path, self.pass_on)
        for path in ("/v1/models", "/version"):
            app.router.add_get(path, self.pass_on)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.prometheus)
        app.router.add_get("/bridge/info", self.info)
        app.router.add_post("/bridge/calls", self.take_calls)
        app.router.add_post("/bridge/idle-calls", self.take_idle_calls)
        app.router.add_post("/bridge/weights", self.load_weights)
        app.router.add_post("/bridge/pause", self.pause)
        app.router.add_post("/bridge/resume", self.resume)
        app.router.add_post("/bridge/score", self.score)
        return app

    async def pass_on(self, request: web.Request) -> web.Response:
        """A request that samples nothing, answered by any replica."""
        body = await request.read()
        async with self.pool.lease("") as (_, engine):
            headers = {"Content-Type": request.headers.get("Content-Type", "application/json"), **engine.headers}
            url, timeout = engine.url + request.path, aiohttp.ClientTimeout(total=60)
            call = engine.session.request(request.method, url, data=body or None, headers=headers, timeout=timeout)
            async with call as upstream:
                answer = web.Response(body=await upstream.read(), status=upstream.status)
                answer.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
                return answer

    async def health(self, request: web.Request) -> web.Response:
        serving = len(self.pool.serving)
        states = {replica.number: replica.state for replica in self.pool.replicas}
        return web.json_response(
            {"status": "ok" if serving else "no replica serves", "replicas": states}, status=200 if serving else 503
        )

    async def prometheus(self, request: web.Request) -> web.Response:
        text = self.metrics.text(
            policy_version=self.gate.version,
            in_flight=len(self.gate.flights),
            queued=self.pool.queued,
            replicas_serving=len(self.pool.serving),
            replica_restarts=self.pool.restarted,
            captured_calls=self.store.size,
            dropped_calls=self.store.dropped,
        )
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def info(self, request: web.Request) -> web.Response:
        """What a trainer needs to know: versions, names, replicas, and the shared-memory folder for weights."""
        engine = self.config.engine
        replicas = [
            {
                "number": replica.number,
                "state": replica.state,
                "url": replica.engine.url if replica.engine else replica.url,
                "vllm": replica.engine.version if replica.engine else "",
                "in_flight": replica.in_flight,
                "restarts": len(replica.restarts),
            }
            for replica in self.pool.replicas
        ]
        return web.json_response(
            {
                "version": self.gate.version,
                "in_flight": len(self.gate.flights),
                "queued": self.pool.queued,
                "model": engine.served_name or engine.model,
                "vllm": next((replica["vllm"] for replica in replicas if replica["vllm"]), ""),
                "tensor_parallel_size": engine.tensor_parallel_size,
                "replicas": replicas,
                "weights_dir": str(self.directory.path),
                "captured_calls": self.store.size,
                "dropped_calls": self.store.dropped,
            }
        )

    async def take_calls(self, request: web.Request) -> web.Response:
        """Hand out, and forget, the captured calls of the sessions named in `{"sessions": [...]}`."""
        sessions = (await _json_body(request)).get("sessions")
        if not isinstance(sessions, list):
            raise BridgeError('/bridge/calls wants {"sessions": [...]}')
        return self._handed_out([str(session) for session in sessions])

    async def take_idle_calls(self, request: web.Request) -> web.Response:
        """The same for sessions that have been silent for `idle` seconds, at most `limit` of them."""
        body = await _json_body(request)
        return self._handed_out(self.store.idle(float(body.get("idle", 5.0)), int(body.get("limit", 256))))

    def _handed_out(self, sessions: list[str]) -> web.Response:
        for session in sessions:
            self.pool.forget(session)
        return web.Response(body=msgspec.json.encode(self.store.take(sessions)), content_type="application/json")

    async def load_weights(self, request: web.Request) -> web.Response:
        """Put the weights that an `Update` describes into all replicas."""
        try:
            update = Update(**await _json_body(request))
        except ValidationError as error:
            raise BridgeError(f"not an update: {error}") from error
        seconds = await self.publisher.publish(update)
        return web.json_response({"version": update.version, "seconds": seconds})

    async def pause(self, request: web.Request) -> web.Response:
        """Hold new requests; those inside an engine go on."""
        self.gate.pause()
        return web.json_response({"in_flight": len(self.gate.flights)})

    async def resume(self, request: web.Request) -> web.Response:
        self.gate.resume()
        return web.json_response({})

    async def score(self, request: web.Request) -> web.Response:
        """Logprobs of `{"token_ids": [...]}`, each but the first given those before it, by every serving replica."""
        ids = (await _json_body(request)).get("token_ids")
        if not isinstance(ids, list) or len(ids) < 2:
            raise BridgeError('/bridge/score wants {"token_ids": [...]} of at least two tokens')
        engine = self.config.engine
        body = {"model": engine.served_name or engine.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        scores = {}
        for replica in self.pool.serving:
            assert replica.engine is not None
            answer = await replica.engine.post("/v1/completions", body, timeout=120)
            steps = answer["choices"][0]["prompt_logprobs"][1:]
            scores[replica.number] = [step[str(token)]["logprob"] for step, token in zip(steps, ids[1:], strict=True)]
        return web.json_response({"version": self.gate.version, "replicas": scores})

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self.config.api_key
        if key and request.path not in _OPEN_ROUTES:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            given = given or request.headers.get("X-Api-Key", "")
            if not hmac.compare_digest(given.encode(), key.encode()):
                return _error(request, 401, "the bridge wants its api_key: `Authorization: Bearer KEY`")
        return await handler(request)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The error object of the client's dialect for everything that goes wrong here."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        routes = [*(f"/{route}" for route in GENERATION_ROUTES), *_PASSED_ON, "/v1/models", "/health", "/metrics"]
        return _error(request, 404, f"no such route: {request.path}; the bridge serves {', '.join(routes)}")
    except web.HTTPRequestEntityTooLarge:
        return _error(request, 413, "the request is larger than max_request_mib")
    except web.HTTPException as error:
        return _error(request, error.status, error.reason)
    except Overloaded as error:
        return _error(request, error.status, str(error))
    except AttemptFailed as error:
        return _error(request, 502, str(error))
    except BridgeError as error:
        return _error(request, 500 if request.path.startswith("/bridge/weights") else 400, str(error))
    except TimeoutError:
        return _error(request, 504, "no answer within request_timeout")
    except aiohttp.ClientError as error:
        return _error(request, 502, f"the engine could not be reached: {error!r}")


def _error(request: web.Request, status: int, message: str) -> web.Response:
    error: dict[str, Any] = {"message": message, "type": "bridge_error", "code": status}
    body = {"type": "error", "error": error} if request.path.startswith("/v1/messages") else {"error": error}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.json_response(body, status=status, headers=headers)


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise BridgeError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BridgeError("the request body must be a JSON object")
    return body
