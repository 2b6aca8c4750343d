"""Runs inside vLLM's API server: tells the bridge what was sampled for a request, and carries out weight updates.

vLLM imports it through `--middleware`. An answer to a request that carries `X-Bridge-Call` gets the record of its
tokens (`bridge.record`) put in before its last part; all other bytes are vLLM's own. The control routes are
`/bridge/version`, `/bridge/stage`, `/bridge/commit` and `/bridge/discard`.
"""

import asyncio
import contextvars
import hmac
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bridge.record import CALL_HEADER, SEPARATOR, TOKEN_HEADER, Choice, Generation, encode

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("vllm.bridge")

_CALL = CALL_HEADER.lower().encode()
_TOKEN = TOKEN_HEADER.lower().encode()
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "n", "repetition_penalty")

_running: contextvars.ContextVar["Call | None"] = contextvars.ContextVar("bridge_call", default=None)


@dataclass
class _Growing:
    """A generation under way.

    Args:
        version: policy version when it began.
        marks: by choice, (version, tokens sampled before it) for updates that overtook it, where the engine core does
            not report versions itself.
    """

    version: int
    sampling: dict[str, Any]
    expected: int
    first_token: float = 0.0
    prompt_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.choices) == self.expected and all(choice.finish_reason for choice in self.choices.values())

    def read(self, output: Any, delta: bool) -> None:
        """Take over a `RequestOutput` of the engine, which holds all tokens so far, or the new ones (`delta`)."""
        if output.prompt_token_ids:
            self.prompt_ids = list(output.prompt_token_ids)
        for completion in output.outputs:
            choice = self.choices.setdefault(completion.index, Choice(completion.index, [], [], "", []))
            ids = list(completion.token_ids)
            logprobs = [step[token].logprob for step, token in zip(completion.logprobs or [], ids, strict=False)]
            choice.ids = choice.ids + ids if delta else ids
            choice.logprobs = choice.logprobs + logprobs if delta else logprobs
            if choice.ids and not self.first_token:
                # A request that is answered at once, when it is complete, still knows when its first token came.
                metrics = getattr(output, "metrics", None)
                latency = getattr(metrics, "first_token_latency", 0.0)
                self.first_token = metrics.arrival_time + latency if metrics and latency else time.time()
            if completion.finish_reason:
                choice.finish_reason = str(completion.finish_reason)
                choice.versions = self._spans(completion, len(choice.ids))

    def _spans(self, completion: Any, length: int) -> list[tuple[int, int, int]]:
        spans = getattr(completion, "weight_versions", None)
        if not spans:
            starts = [(self.version, 0)]
            for version, before in self.marks.get(completion.index, []):
                if before < max(length, 1):
                    starts = [start for start in starts if start[1] != before] + [(version, before)]
            ends = [start for _, start in starts[1:]] + [length]
            return [(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]
        numbered = [
            (int(span.version) if str(span.version).isdigit() else self.version, span.start, span.end) for span in spans
        ]
        return numbered if numbered[-1][2] == length else [*numbered[:-1], (*numbered[-1][:2], length)]

    def as_record(self) -> Generation:
        choices = [choice for _, choice in sorted(self.choices.items())]
        return Generation(self.prompt_ids, self.sampling, self.first_token, choices)


@dataclass
class Call:
    """One recorded request: its generations that the bridge has not heard of yet.

    Args:
        tokens_only: nobody reads its text, so that none need be made, token by token.
    """

    tokens_only: bool = False
    generations: list[_Growing] = field(default_factory=list)

    def take(self) -> bytes:
        """The record of what there is, framed; empty while a generation is under way or none is there."""
        if not self.generations or not all(one.finished for one in self.generations):
            return b""
        record = encode([one.as_record() for one in self.generations])
        self.generations.clear()
        return SEPARATOR + record + SEPARATOR


class CaptureMiddleware:
    """A pure ASGI middleware: the engine's `generate` then runs in the context of its request."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.version = 0
        self.engine: Any = None
        self.active: dict[str, _Growing] = {}
        self.token = os.environ.get("BRIDGE_TOKEN", "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if self.token and not hmac.compare_digest(headers.get(_TOKEN, b""), self.token):
            return await _answer(send, 401, {"error": f"this server wants the bridge's token in {TOKEN_HEADER}"})
        self._wrap_engine(scope["app"])
        if scope["path"].startswith("/bridge/"):
            return await self._control(scope["path"].removeprefix("/bridge/"), receive, send)
        if _CALL not in headers:
            return await self.app(scope, receive, send)
        call = Call(tokens_only=scope["path"] == "/inference/v1/generate")
        token = _running.set(call)
        try:
            await self.app(scope, receive, _with_record(call, send))
        finally:
            _running.reset(token)

    def _wrap_engine(self, app: Any) -> None:
        engine = app.state.engine_client
        if self.engine is engine:
            return
        self.engine, generate = engine, engine.generate

        async def recorded(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
            call, generation = _running.get(), None
            prompt = _salted(prompt, self.version)
            if call is not None:
                sampling_params = sampling_params.clone()
                if sampling_params.logprobs is None:
                    sampling_params.logprobs = 0
                if call.tokens_only and not sampling_params.stop:
                    sampling_params.detokenize = False
                sampling = {name: getattr(sampling_params, name, None) for name in _SAMPLING}
                generation = _Growing(self.version, sampling, sampling_params.n)
                call.generations.append(generation)
                self.active[request_id] = generation
            outputs: AsyncIterator[Any] = generate(prompt, sampling_params, request_id, *args, **kwargs)
            try:
                async for output in outputs:
                    if generation is not None:
                        generation.read(output, sampling_params.output_kind.name == "DELTA")
                    yield output
            finally:
                self.active.pop(request_id, None)

        engine.generate = recorded

    async def _control(self, route: str, receive: Receive, send: Send) -> None:
        body = json.loads(await _body(receive) or b"{}")
        try:
            if route == "version":
                if "version" in body:
                    await self._serve(int(body["version"]))
                await _answer(send, 200, {"version": self.version, "spans": self.reports_spans})
            elif route == "stage":
                workers = await self.engine.collective_rpc(f"bridge_stage_{body['kind']}", kwargs=body["arguments"])
                await _answer(send, 200, {"workers": workers})
            elif route == "commit":
                await _answer(send, 200, await self._commit(int(body["version"]), bool(body["pause"])))
            elif route == "discard":
                await _answer(send, 200, {"workers": await self.engine.collective_rpc("bridge_discard")})
            else:
                await _answer(send, 404, {"error": f"no such route: /bridge/{route}"})
        except Exception as error:  # the bridge decides what a failed control call means; it needs the reason
            logger.exception("/bridge/%s failed", route)
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})

    @property
    def reports_spans(self) -> bool:
        """Whether the weight version of every token is known even if an update overtakes its request."""
        return hasattr(self.engine, "update_weight_version") or (
            hasattr(self.engine, "output_processor") and hasattr(self.engine.engine_core, "outputs_queue")
        )

    async def _commit(self, version: int, pause: bool) -> dict[str, Any]:
        """Put what is staged into the model; requests in flight are frozen meanwhile and go on with it."""
        start = time.monotonic()
        if pause:
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        try:
            workers = await self.engine.collective_rpc("bridge_commit")
            if pause and not hasattr(self.engine, "update_weight_version"):
                await self._mark(version)
            await self._serve(version)
        finally:
            if pause:
                await self.engine.resume_generation()
        return {"workers": workers, "seconds": time.monotonic() - start}

    async def _serve(self, version: int) -> None:
        self.version = version
        if hasattr(self.engine, "update_weight_version"):
            await self.engine.update_weight_version(str(version))

    async def _mark(self, version: int) -> None:
        """Note how many tokens each request has when the version changes, for engines that do not (0.26).

        A pause is answered after the outputs of every batch before it, over the same channel; so once what has arrived
        is worked off, the counts are those of the old weights.
        """
        while not self.engine.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the last of it reaches its request
        counts = {
            (state.external_req_id, state.request_index): state.detokenizer.num_output_tokens()
            for state in self.engine.output_processor.request_states.values()
            if state.detokenizer is not None
        }
        for request_id, generation in self.active.items():
            for index in range(generation.expected):
                choice = generation.choices.get(index)
                if choice is None or not choice.finish_reason:
                    marks = generation.marks.setdefault(index, [])
                    marks.append((version, counts.get((request_id, index), 0)))


def _salted(prompt: Any, version: int) -> Any:
    """The prompt with keys of its own in the prefix cache: an update does not clear that of requests in flight."""
    if isinstance(prompt, dict):
        return {**prompt, "cache_salt": f"{prompt.get('cache_salt') or ''}/v{version}"}
    if hasattr(prompt, "cache_salt"):
        prompt.cache_salt = f"{prompt.cache_salt or ''}/v{version}"
        return prompt
    raise TypeError(f"a prompt of type {type(prompt).__name__} cannot be kept apart by weight version")


def _with_record(call: Call, send: Send) -> Send:
    """Sends the record of a complete generation in front of the part of the answer that follows it."""
    recording = False

    async def sending(message: Message) -> None:
        nonlocal recording
        if message["type"] == "http.response.start":
            recording = message["status"] == 200
            if recording:  # the length changes, so the server must not announce it
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
                message = {**message, "headers": kept}
        elif message["type"] == "http.response.body" and recording:
            message = {**message, "body": call.take() + message.get("body", b"")}
        await send(message)

    return sending


async def _answer(send: Send, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _body(receive: Receive) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            return data
