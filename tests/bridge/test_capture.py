"""Conversations captured from real clients: what joins, what forks, and that nothing is tokenized again."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from bridge.client import BridgeClient
from bridge.protocol import Sample
from bridge.sequences import samples_from_calls
from tests.bridge.test_serving import MESSAGES, MODEL, captured, post
from tests.conftest import forward_logprobs, run, serving

pytestmark = pytest.mark.engine
CHAT = "v1/chat/completions"


async def chat(url: str, session: str, messages: list[dict[str, str]], **settings: Any) -> str:
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 1.0, "seed": 1, **settings}
    status, answer = await post(url, CHAT, body, session)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def sequences(url: str, session: str) -> list[Sample]:
    return samples_from_calls(run(captured(url, session)))


def test_a_conversation_with_tool_messages_is_one_sequence_of_the_engines_own_tokens(bridge_url: str, tiny: Any):
    async def talk() -> None:
        messages = list(MESSAGES)
        for number in range(3):
            answer = await chat(bridge_url, "tools", messages)
            tool = {"role": "tool", "content": f"{number + 1} + {number}", "tool_call_id": "1"}
            messages += [{"role": "assistant", "content": answer}, tool]

    run(talk())
    calls = run(captured(bridge_url, "tools"))
    (sample,) = samples_from_calls(calls)
    assert [call.index for call in calls] == [0, 1, 2] and sample.fork == ""
    assert sample.ids.tolist() == calls[-1].prompt_ids + calls[-1].completion_ids
    assert sample.response_length == sum(len(call.completion_ids) for call in calls)
    logprobs = forward_logprobs(tiny[0], sample.ids[:1].tolist(), sample.ids[1:].tolist()).numpy()
    assert abs(logprobs - sample.logprobs[1:])[sample.sampled[1:]].max() < 1e-4


def test_a_client_that_strips_thinking_forks_and_the_fork_says_where(bridge_url: str):
    async def talk() -> None:
        answer = await chat(bridge_url, "strip", MESSAGES)
        stripped = {"role": "assistant", "content": answer[3:]}
        await chat(bridge_url, "strip", [*MESSAGES, stripped, {"role": "user", "content": "1 + 1 = ?"}])

    run(talk())
    first, second = sequences(bridge_url, "strip")
    assert first.fork == "" and second.fork.startswith("rewritten: token ")
    assert not set(first.ids[first.sampled]) - set(first.ids) and second.response_length > 0


def test_parallel_branches_share_their_stem_and_train_it_once(bridge_url: str):
    async def talk() -> None:
        answer = await chat(bridge_url, "branches", MESSAGES)
        stem = [*MESSAGES, {"role": "assistant", "content": answer}]
        asked = [[*stem, {"role": "user", "content": f"{number} + 1 = ?"}] for number in range(3)]
        await asyncio.gather(*(chat(bridge_url, "branches", messages) for messages in asked))

    run(talk())
    calls = run(captured(bridge_url, "branches"))
    samples = samples_from_calls(calls)
    assert len(samples) == 3 and [sample.fork.split(":")[0] for sample in samples] == ["", "branch", "branch"]
    assert sum(sample.response_length for sample in samples) == sum(len(call.completion_ids) for call in calls)

    async def metrics() -> str:
        async with aiohttp.ClientSession() as http, http.get(f"{bridge_url}/metrics") as response:
            return await response.text()

    assert 'bridge_forks_total{reason="branch"}' in run(metrics())


def test_openais_responses_client_is_captured(bridge_url: str):
    async def ask() -> str:
        headers = {"X-Session-ID": "openai-responses"}
        async with AsyncOpenAI(base_url=f"{bridge_url}/v1", api_key="none", default_headers=headers) as client:
            answer = await client.responses.create(model=MODEL, input="12 + 34 = ?", max_output_tokens=16)
            return answer.output_text

    assert run(ask())
    (call,) = run(captured(bridge_url, "openai-responses"))
    assert call.dialect == "v1/responses" and call.completion_ids


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_works_unmodified_and_is_captured(bridge_url: str, tiny: Any, stream: bool):
    session = f"anthropic-{stream}"

    async def ask() -> str:
        async with AsyncAnthropic(
            base_url=bridge_url, api_key="none", default_headers={"X-Session-ID": session}
        ) as client:
            settings: Any = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES}
            if stream:
                async with client.messages.stream(**settings) as answer:
                    return "".join([text async for text in answer.text_stream])
            message = await client.messages.create(**settings)
            return message.content[0].text  # pyright: ignore[reportAttributeAccessIssue]

    text = run(ask())
    (call,) = run(captured(bridge_url, session))
    assert text == tiny[1].decode(call.completion_ids, skip_special_tokens=True)
    expected = forward_logprobs(tiny[0], call.prompt_ids, call.completion_ids)
    assert (expected - expected.new_tensor(call.logprobs)).abs().max() < 1e-4


def test_curl_works(bridge_url: str):
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 8})
    command = ["curl", "-sS", f"{bridge_url}/{CHAT}", "-H", "Content-Type: application/json", "-d", body]
    command += ["-H", "X-Session-ID: curl"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert answer["choices"][0]["message"]["content"]
    assert len(run(captured(bridge_url, "curl"))) == 1


def test_vf_eval_works_and_each_of_its_rollouts_is_captured(bridge_url: str, tmp_path: Path):
    async def captured_calls() -> int:
        async with BridgeClient(bridge_url) as client:
            return (await client.info())["captured_calls"]

    before = run(captured_calls())
    command = [str(Path(sys.executable).with_name("vf-eval")), "dapo-math", "-n", "3", "-r", "2", "-m", MODEL]
    command += ["--client.base-url", f"{bridge_url}/v1", "--client.api-key-var", "NONE", "--sampling.max-tokens", "16"]
    command += ["--env.agent.runtime.type", "subprocess", "--env.taskset.dataset", "arithmetic"]
    command += ["--env.taskset.prompt-style", "plain", "--no-push", "--no-rich", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(captured_calls()) == before + 6


def test_captured_calls_are_kept_as_parquet_over_a_kill(tmp_path: Path):
    from bridge.storage import read_calls
    from tests.bridge.test_routing import completion, free_port, started, stub

    port = free_port()
    with stub(port):
        bridge, ready = started(tmp_path, [port], "--capture-dir", str(tmp_path / "calls"))
        while not ready.exists():
            assert bridge.poll() is None
        run(post(ready.read_text(), "v1/completions", completion(), "kept"))
        bridge.kill()
        bridge.wait()
        (call,) = read_calls(tmp_path / "calls")
        assert call.session == "kept" and call.completion_ids == [7, 7, 7]


SMOLLM2 = os.environ.get("SMOLLM2_DIR", "")


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2_DIR names no model; make one with tests/build_smollm2.py")
def test_a_pretrained_models_capture_is_exact_in_every_dialect_and_at_every_temperature(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    bodies: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "Name three colours."}]},
        "v1/completions": {"prompt": "The capital of France is"},
        "v1/responses": {"input": "What is 7 times 8?"},
        "v1/messages": {"messages": [{"role": "user", "content": "Say something short."}]},
        "inference/v1/generate": {"token_ids": list(range(400, 430))},
    }

    async def ask(url: str) -> None:
        asked = []
        for dialect, body in bodies.items():
            for temperature in (0.7, 1.0, 1.3):
                limit = "max_output_tokens" if dialect == "v1/responses" else "max_tokens"
                settings = {limit: 32, "temperature": temperature}
                if dialect == "inference/v1/generate":
                    settings = {"sampling_params": settings}
                request = {"model": SMOLLM2, **body, **settings}
                asked.append(post(url, dialect, request, f"{dialect}-{temperature}"))
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}

    with serving(SMOLLM2, tmp_path, "--engine.max-model-len", "512") as url:
        run(ask(url))
        for dialect in bodies:
            for temperature in (0.7, 1.0, 1.3):
                (call,) = run(captured(url, f"{dialect}-{temperature}"))
                expected = forward_logprobs(model, call.prompt_ids, call.completion_ids, temperature)
                assert (expected - expected.new_tensor(call.logprobs)).abs().max() < 1e-4
