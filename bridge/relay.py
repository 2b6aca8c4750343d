"""One generation request on its way: queue, gate, engine, capture, answer; and again from the start when that fails."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from bridge.capture import CaptureStore, calls_from
from bridge.config import BridgeConfig
from bridge.engine import Engine
from bridge.gate import Flight, Interrupted, VersionGate
from bridge.observe import Metrics
from bridge.pool import Overloaded, Pool, Replica
from bridge.protocol import SESSION_HEADER, BridgeError, ModelCall
from bridge.record import CALL_HEADER, Record, RecordReader

logger = logging.getLogger("bridge")

GENERATION_ROUTES = (
    "v1/chat/completions",
    "v1/completions",
    "v1/responses",
    "v1/messages",
    "inference/v1/generate",
)
_FORWARDED = ("Content-Type", "Accept", SESSION_HEADER, "X-Request-Id", "traceparent", "anthropic-version")
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)


class AttemptFailed(Exception):
    """An engine did not answer as it must. `answer` is what it said, for the client of the last attempt."""

    def __init__(self, reason: str, message: str, answer: web.Response | None = None) -> None:
        super().__init__(message)
        self.reason, self.answer = reason, answer


@dataclass
class _Request:
    """What stays the same over the attempts at one request."""

    route: str
    session: str
    index: int
    body: bytes
    headers: dict[str, str]
    queued: float
    retries: int = 0
    captured: bool = False


class Relay:
    """Answers generation requests of every dialect; the answer's bytes are the engine's own."""

    def __init__(
        self, config: BridgeConfig, pool: Pool, gate: VersionGate, store: CaptureStore, metrics: Metrics
    ) -> None:
        self.config, self.pool, self.gate, self.store, self.metrics = config, pool, gate, store, metrics

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        """Forward one request and capture its answer."""
        queued = time.time()
        body = await http.read()
        session = http.headers.get(SESSION_HEADER) or f"anonymous-{uuid.uuid4().hex}"
        index = self.store.begin(session)
        headers = {name: http.headers[name] for name in _FORWARDED if name in http.headers}
        headers[CALL_HEADER] = f"{session}/{index}"
        request = _Request(http.path.lstrip("/"), session, index, body, headers, queued)
        status, error = 499, "the client went away"
        try:
            async with asyncio.timeout(self.config.request_timeout):
                response = await self._until_answered(http, request)
            status, error = response.status, "" if response.status < 400 else f"answered with {response.status}"
            return response
        except Overloaded as refused:
            status, error = refused.status, str(refused)
            raise
        except TimeoutError:
            status, error = 504, "no answer within request_timeout"
            raise
        except AttemptFailed as failed:
            status, error = (failed.answer.status if failed.answer else 502), str(failed)
            if failed.answer:
                return failed.answer
            raise
        finally:
            if error and not request.captured:
                self.store.add(self._without_answer(request, error))
            self.store.end(session)
            self.metrics.answered(request.route, status, time.time() - queued)

    async def _until_answered(self, http: web.Request, request: _Request) -> web.StreamResponse:
        failures = 0
        while True:
            try:
                async with (
                    self.pool.lease(request.session) as (replica, engine),
                    self.gate.request(replica.number) as flight,
                ):
                    self.metrics.waited(time.time() - request.queued)
                    return await self._attempt(http, request, replica, engine, flight)
            except Interrupted as reason:
                self.metrics.retried("overtaken" if "overtaken" in str(reason) else "lost")
            except AttemptFailed as failed:
                self.metrics.retried(failed.reason)
                # A replica that is lost has been taken out; to wait for another is no failure of the request.
                failures += failed.reason != "lost"
                logger.warning("session %s call %d: %s", request.session, request.index, failed)
                if failures > self.config.max_retries:
                    raise
                await asyncio.sleep(0.05 * 2**failures)
            request.retries += 1

    async def _attempt(
        self, http: web.Request, request: _Request, replica: Replica, engine: Engine, flight: Flight
    ) -> web.StreamResponse:
        url, headers = f"{engine.url}/{request.route}", {**request.headers, **engine.headers}
        try:
            async with engine.session.post(url, data=request.body, headers=headers, timeout=_NO_TIMEOUT) as upstream:
                if upstream.status == 200 and upstream.content_type == "text/event-stream":
                    return await self._stream(http, request, replica, upstream, flight)
                body = await upstream.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            reason = "lost" if await self.pool.is_gone(replica) else "connection"
            raise AttemptFailed(reason, f"{replica.name} broke off: {error!r}") from error
        if upstream.status != 200:
            answer = web.Response(body=body, status=upstream.status)
            answer.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
            if upstream.status >= 500:
                raise AttemptFailed("engine_error", f"{replica.name} answered {upstream.status}", answer)
            return answer
        reader = RecordReader()
        clean, records = self._read(reader, body, replica)
        if reader.inside or not records:
            raise AttemptFailed("malformed", f"{replica.name} answered without a record of its tokens")
        if request.route == "inference/v1/generate":
            try:
                clean = engine.adapter.generate_answer(clean)
            except (msgspec.MsgspecError, AttributeError) as error:
                raise AttemptFailed("malformed", f"{replica.name} answered with another shape: {error}") from error
        self._capture(request, replica, records)
        return web.Response(body=clean, content_type=upstream.content_type)

    async def _stream(
        self,
        http: web.Request,
        request: _Request,
        replica: Replica,
        upstream: aiohttp.ClientResponse,
        flight: Flight,
    ) -> web.StreamResponse:
        """Pass server-sent events on as they come. Once the client has seen some, nothing can start again."""
        response = web.StreamResponse(headers={"Content-Type": upstream.headers["Content-Type"]})
        reader = RecordReader()
        try:
            async for data in upstream.content.iter_any():
                clean, records = self._read(reader, data, replica)
                if records:
                    self._capture(request, replica, records)
                if clean:
                    if not flight.sent:
                        flight.sent = True
                        await response.prepare(http)
                    await self._write(response, clean)
            if reader.inside or not request.captured:
                raise AttemptFailed("malformed", f"{replica.name} ended a stream without a record of its tokens")
        except (AttemptFailed, aiohttp.ClientError) as error:
            if not flight.sent:
                raise
            message = str(error) if isinstance(error, AttemptFailed) else f"{replica.name} broke off: {error!r}"
            logger.warning("session %s call %d: %s, within its answer", request.session, request.index, message)
            self.metrics.retried("impossible")
            event = msgspec.json.encode({"error": {"message": message, "type": "bridge_error", "code": 502}})
            await self._write(response, b"data: " + event + b"\n\n")
        await response.write_eof()
        return response

    @staticmethod
    async def _write(response: web.StreamResponse, data: bytes) -> None:
        try:
            await response.write(data)
        except ConnectionError as error:  # the client's side, not the engine's
            raise asyncio.CancelledError("the client went away") from error

    @staticmethod
    def _read(reader: RecordReader, data: bytes, replica: Replica) -> tuple[bytes, list[Record]]:
        try:
            return reader.feed(data)
        except msgspec.MsgspecError as error:
            raise AttemptFailed("malformed", f"{replica.name} sent a damaged record: {error}") from error

    def _capture(self, request: _Request, replica: Replica, records: list[Record]) -> None:
        try:
            calls = calls_from(
                (generation for record in records for generation in record),
                queued=request.queued,
                dialect=request.route,
                session=request.session,
                index=request.index,
                replica=replica.number,
                retries=request.retries,
            )
        except BridgeError as error:
            raise AttemptFailed("malformed", f"{replica.name}: {error}") from error
        for call in calls:
            self.store.add(call)
        request.captured = True

    def _without_answer(self, request: _Request, error: str) -> ModelCall:
        return ModelCall(
            session=request.session,
            index=request.index,
            dialect=request.route,
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            sampling={},
            finish_reason="",
            queued=request.queued,
            first_token=0.0,
            end=time.time(),
            retries=request.retries,
            error=error,
        )
