"""The bridge in front of a real vLLM: what clients see, and what is captured."""

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError
from transformers import AutoTokenizer

from bridge.client import BridgeClient
from bridge.protocol import ModelCall
from tests.conftest import forward_logprobs, run
from trainer.tiny import tiny_model_dir

pytestmark = pytest.mark.engine
MODEL = str(tiny_model_dir())
MESSAGES = [{"role": "user", "content": "12 + 34 = ?"}]


def request(dialect: str, **settings: Any) -> dict[str, Any]:
    if dialect == "inference/v1/generate":
        ids = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(MESSAGES, add_generation_prompt=True)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        return {"model": MODEL, "token_ids": ids, "sampling_params": {"max_tokens": 20, **settings}}
    limit = "max_output_tokens" if dialect == "v1/responses" else "max_tokens"
    asked = {"v1/completions": {"prompt": "7 - 5 = ?"}, "v1/responses": {"input": MESSAGES[0]["content"]}}
    return {"model": MODEL, limit: 20, **asked.get(dialect, {"messages": MESSAGES}), **settings}


async def post(url: str, dialect: str, body: dict[str, Any], session: str = "") -> tuple[int, Any]:
    headers = {"X-Session-ID": session} if session else {}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/{dialect}", json=body, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


async def captured(url: str, session: str) -> list[ModelCall]:
    async with BridgeClient(url) as client:
        return (await client.take_calls([session]))[session]


DIALECTS = ["v1/chat/completions", "v1/completions", "inference/v1/generate", "v1/responses", "v1/messages"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_captured_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(
    bridge_url: str, tiny: Any, dialect: str, temperature: float
):
    session = f"{dialect}-{temperature}"
    status, _ = run(post(bridge_url, dialect, request(dialect, temperature=temperature), session))
    assert status == 200
    (call,) = run(captured(bridge_url, session))
    expected = forward_logprobs(tiny[0], call.prompt_ids, call.completion_ids, temperature)
    assert (expected - expected.new_tensor(call.logprobs)).abs().max() < 1e-4
    assert call.finish_reason in ("stop", "length") and call.queued <= call.first_token <= call.end
    assert call.sampling["temperature"] == temperature
    assert [(span.version, span.end) for span in call.versions] == [(0, len(call.completion_ids))]


def test_captured_ids_are_the_engines_own(bridge_url: str):
    body = request("v1/chat/completions", seed=5, return_token_ids=True, logprobs=True)
    _, answer = run(post(bridge_url, "v1/chat/completions", body, "own-ids"))
    (call,) = run(captured(bridge_url, "own-ids"))
    choice = answer["choices"][0]
    assert call.completion_ids == choice["token_ids"]
    assert call.prompt_ids == answer["prompt_token_ids"]
    assert call.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]


def told(data: bytes, stream: bool) -> Any:
    """An answer without what no two answers share: ids, times, and at which tokens a stream was cut into events."""
    text = re.sub(
        rb'"(id|item_id|created|created_at|completed_at|sequence_number)":("[^"]*"|[\d.]+)', b"", data
    ).decode()
    if not stream:
        return text
    pieces = r'"(content|text|delta)":"((?:[^"\\]|\\.)*)"'
    events = [re.sub(pieces, "", line) for line in text.splitlines() if line]
    kinds = [event for number, event in enumerate(events) if event not in events[:number]]
    return kinds, "".join(piece for _, piece in re.findall(pieces, text))


async def raw(url: str, dialect: str, body: dict[str, Any], session: str) -> tuple[bytes, str]:
    headers = {"X-Session-ID": session}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/{dialect}", json=body, headers=headers) as response:
        return await response.read(), response.content_type


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_clients_see_byte_for_byte_what_vllm_itself_answers(bridge_url: str, dialect: str, stream: bool):
    if dialect == "inference/v1/generate":
        pytest.skip("answered in the shape that renderers reads, which is its own test")

    async def both() -> tuple[tuple[bytes, str], tuple[bytes, str]]:
        async with BridgeClient(bridge_url) as client:
            engine = (await client.info())["replicas"][0]["url"]
        body = request(dialect, temperature=0.0, **({"stream": True} if stream else {}))
        return await raw(engine, dialect, body, "direct"), await raw(bridge_url, dialect, body, f"bytes-{dialect}")

    (direct, kind), (bridged, same_kind) = run(both())
    assert told(direct, stream) == told(bridged, stream) and kind == same_kind
    (call,) = run(captured(bridge_url, f"bytes-{dialect}"))
    assert call.completion_ids and len(call.completion_ids) == len(call.logprobs)


@pytest.mark.parametrize("dialect", ["v1/chat/completions", "v1/completions"])
def test_a_streamed_answer_is_captured_like_an_unstreamed_one(bridge_url: str, dialect: str):
    body = request(dialect, seed=11)
    run(raw(bridge_url, dialect, {**body, "stream": True}, f"stream-{dialect}"))
    run(raw(bridge_url, dialect, body, f"whole-{dialect}"))
    ((one,), (two,)) = run(captured(bridge_url, f"stream-{dialect}")), run(captured(bridge_url, f"whole-{dialect}"))
    assert one.completion_ids == two.completion_ids and one.prompt_ids == two.prompt_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert one.finish_reason == two.finish_reason


def test_a_stream_is_captured_before_its_client_has_seen_the_end(bridge_url: str):
    async def scenario() -> None:
        body = request("v1/chat/completions", stream=True)
        async with BridgeClient(bridge_url) as client, aiohttp.ClientSession() as http:
            headers = {"X-Session-ID": "early"}
            async with http.post(f"{bridge_url}/v1/chat/completions", json=body, headers=headers) as response:
                async for line in response.content:
                    if b'finish_reason":"' in line:
                        assert len((await client.take_calls(["early"]))["early"]) == 1
                        return
        raise AssertionError("the stream has no end")

    run(scenario())


def test_several_prompts_of_one_request_are_captured_each(bridge_url: str):
    body = {**request("v1/completions", n=2), "prompt": ["1 + 1 = ?", "2 + 2 = ?"]}
    run(post(bridge_url, "v1/completions", body, "batch"))
    calls = run(captured(bridge_url, "batch"))
    assert len(calls) == 4 and len({tuple(call.prompt_ids) for call in calls}) == 2


def test_renderers_own_client_reads_the_generate_answer(bridge_url: str):
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.client import generate

    async def call() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{bridge_url}/v1", api_key="none") as client:
            return await generate(
                client=client,
                renderer=create_renderer(load_tokenizer(MODEL), None),
                messages=MESSAGES,  # pyright: ignore[reportArgumentType]
                model=MODEL,
                sampling_params={"max_tokens": 20, "temperature": 1.0},
                extra_headers={"X-Session-ID": "renderers"},
            )

    result = run(call())
    (captured_call,) = run(captured(bridge_url, "renderers"))
    assert result["completion_ids"] == captured_call.completion_ids
    assert result["completion_logprobs"] == captured_call.logprobs
    assert result["prompt_ids"] == captured_call.prompt_ids


def test_openais_client_works_unmodified_and_sees_vllms_errors(bridge_url: str):
    async def calls() -> tuple[str | None, int | None, str]:
        async with AsyncOpenAI(base_url=f"{bridge_url}/v1", api_key="none") as client:
            models = await client.models.list()
            reply = await client.chat.completions.create(
                model=models.data[0].id,
                messages=MESSAGES,  # pyright: ignore[reportArgumentType]
                max_tokens=20,
                n=3,
            )
            assert len(reply.choices) == 3
            with pytest.raises(BadRequestError) as error:
                await client.completions.create(model=MODEL, prompt="1" * 300, max_tokens=5)
            card = models.data[0].model_dump()
            return reply.choices[0].message.content, card["max_model_len"], str(error.value)

    content, max_model_len, error = run(calls())
    assert content and max_model_len == 256 and "256" in error


def test_each_choice_of_one_request_is_a_call_of_its_own(bridge_url: str):
    run(post(bridge_url, "v1/chat/completions", request("v1/chat/completions", n=3, seed=1), "n3"))
    calls = run(captured(bridge_url, "n3"))
    assert len(calls) == 3 and len({tuple(call.prompt_ids) for call in calls}) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("v1/nothing", {}, 404, "no such route"),
        ("inference/v1/generate", {"model": MODEL}, 400, "token_ids"),
        ("v1/chat/completions", {"model": "other", "messages": MESSAGES}, 404, "other"),
        ("v1/messages", {"model": MODEL, "messages": []}, 400, ""),
        ("bridge/weights", {"path": "/etc/passwd", "version": 1}, 500, "not an update"),
        (
            "bridge/weights",
            {"kind": "file", "arguments": {"path": "/etc/passwd"}, "version": 1},
            500,
            "weights must be a file in",
        ),
        ("bridge/calls", {}, 400, "sessions"),
        ("bridge/score", {"token_ids": [1]}, 400, "at least two"),
    ],
)
def test_a_wrong_request_gets_an_openai_error_object(bridge_url: str, path: str, body: Any, status: int, message: str):
    got, answer = run(post(bridge_url, path, body))
    assert got == status and message in answer["error"]["message"]


def test_a_client_that_goes_away_stops_its_request_in_the_engine(bridge_url: str):
    async def scenario() -> None:
        body = request("v1/completions", max_tokens=230, ignore_eos=True)
        async with BridgeClient(bridge_url) as client:
            tasks = [asyncio.create_task(post(bridge_url, "v1/completions", body)) for _ in range(32)]
            while (await client.info())["in_flight"] < 32:
                await asyncio.sleep(0.005)
                assert not any(task.done() for task in tasks), "too fast to be cancelled"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(2):
                while (await client.info())["in_flight"]:
                    await asyncio.sleep(0.01)

    run(scenario())


def test_a_request_that_fails_is_captured_with_its_error_and_no_tokens(bridge_url: str):
    run(post(bridge_url, "v1/chat/completions", {"model": "other", "messages": MESSAGES}, "failed"))
    (call,) = run(captured(bridge_url, "failed"))
    assert call.error == "answered with 404" and not call.completion_ids


def test_health_and_metrics_tell_how_it_is(bridge_url: str):
    async def get(path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(bridge_url + path) as response:
            return response.status, await response.text()

    run(post(bridge_url, "v1/completions", request("v1/completions"), "counted"))
    assert run(get("/health"))[0] == 200
    status, text = run(get("/metrics"))
    assert status == 200 and "bridge_replicas_serving 1.0" in text and "bridge_policy_version 0.0" in text
    assert re.search(r'bridge_requests_total\{route="v1/completions",status="200"\} [1-9]', text)


def test_tokenize_is_vllms_own(bridge_url: str):
    status, answer = run(post(bridge_url, "tokenize", {"model": MODEL, "prompt": "12"}))
    assert status == 200 and answer["count"] == len(answer["tokens"])


def test_128_requests_with_seeds_at_once_are_all_answered(bridge_url: str):
    async def many() -> list[tuple[int, Any]]:
        body = request("v1/completions", max_tokens=8)
        return await asyncio.gather(
            *(post(bridge_url, "v1/completions", {**body, "seed": seed}, f"many-{seed}") for seed in range(128))
        )

    assert {status for status, _ in run(many())} == {200}


def test_calls_are_handed_out_once(bridge_url: str):
    run(post(bridge_url, "v1/completions", request("v1/completions"), "once"))
    assert len(run(captured(bridge_url, "once"))) == 1
    assert run(captured(bridge_url, "once")) == []
