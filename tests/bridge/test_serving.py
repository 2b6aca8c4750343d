"""The bridge in front of a real vLLM: what clients see, and what is captured."""

import asyncio
import json
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
    body = {"model": MODEL, "max_tokens": 20, **settings}
    return body | ({"messages": MESSAGES} if "chat" in dialect else {"prompt": "7 - 5 = ?"})


async def post(url: str, dialect: str, body: dict[str, Any], session: str = "") -> tuple[int, Any]:
    headers = {"X-Session-ID": session} if session else {}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/{dialect}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def captured(url: str, session: str) -> list[ModelCall]:
    async with BridgeClient(url) as client:
        return (await client.take_calls([session]))[session]


DIALECTS = ["v1/chat/completions", "v1/completions", "inference/v1/generate"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_captured_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(
    bridge_url: str, tiny: Any, dialect: str, temperature: float
):
    session = f"{dialect}-{temperature}"
    status, _ = run(post(bridge_url, dialect, request(dialect, temperature=temperature, seed=3), session))
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


def test_what_only_the_capture_needs_is_not_in_the_answer(bridge_url: str):
    _, answer = run(post(bridge_url, "v1/chat/completions", request("v1/chat/completions")))
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["logprobs"] is None and answer["choices"][0]["token_ids"] is None
    assert answer["prompt_token_ids"] is None


@pytest.mark.parametrize("dialect", ["v1/chat/completions", "v1/completions"])
def test_a_streamed_answer_is_captured_like_an_unstreamed_one(bridge_url: str, dialect: str):
    async def stream() -> str:
        text = ""
        headers = {"X-Session-ID": f"stream-{dialect}"}
        body = request(dialect, seed=11, stream=True)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{bridge_url}/{dialect}", json=body, headers=headers) as response,
        ):
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    assert choice.get("logprobs") is None and choice.get("token_ids") is None
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return text

    streamed = run(stream())
    _, answer = run(post(bridge_url, dialect, request(dialect, seed=11), f"whole-{dialect}"))
    choice = answer["choices"][0]
    assert streamed == (choice.get("text") or choice["message"]["content"])
    ((one,), (two,)) = run(captured(bridge_url, f"stream-{dialect}")), run(captured(bridge_url, f"whole-{dialect}"))
    assert one.completion_ids == two.completion_ids and one.prompt_ids == two.prompt_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert one.finish_reason == two.finish_reason


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
        ("inference/v1/generate", {"model": MODEL}, 400, "needs `token_ids`"),
        ("v1/chat/completions", {"model": "other", "messages": MESSAGES}, 404, "other"),
        ("bridge/weights", {"path": "/etc/passwd", "version": 1}, 500, "weights must be a file in"),
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


def test_calls_are_handed_out_once(bridge_url: str):
    run(post(bridge_url, "v1/completions", request("v1/completions"), "once"))
    assert len(run(captured(bridge_url, "once"))) == 1
    assert run(captured(bridge_url, "once")) == []
