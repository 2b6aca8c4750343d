"""Weight updates while requests are under way: what becomes of those, and what the engines then hold."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from bridge.client import BridgeClient
from bridge.gate import Mode
from bridge.protocol import BridgeError, ModelCall
from tests.bridge.test_publish import mismatch, sampled
from tests.bridge.test_serving import captured, post, request
from tests.conftest import forward_logprobs, run, serving
from trainer.tiny import tiny_model_dir

pytestmark = pytest.mark.engine
LONG = request("v1/completions", max_tokens=220, ignore_eos=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny_model_dir(), tmp_path_factory.mktemp("updates"), "--engine.max-model-len", "256") as url:
        yield url


def perturbed(model: Any, seed: int, size: float = 0.05) -> Any:
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def update_under_load(url: str, model: Any, mode: Mode, sessions: list[str], **settings: Any) -> int:
    """Publish while long requests run; gives the new version once all are answered."""

    async def scenario() -> int:
        async with BridgeClient(url) as client:
            version = (await client.info())["version"] + 1
            asked = [asyncio.create_task(post(url, "v1/completions", {**LONG, **settings}, name)) for name in sessions]
            while (await client.info())["in_flight"] < len(sessions):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.15)
            assert not any(task.done() for task in asked)
            await client.publish(dict(model.named_parameters()), version, mode)
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            return version

    return run(scenario())


def calls_of(url: str, sessions: list[str]) -> list[ModelCall]:
    calls = [captured(url, session) for session in sessions]
    found = [run(call) for call in calls]
    assert all(len(of_session) == 1 for of_session in found), "each is captured once"
    return [of_session[0] for of_session in found]


def test_kept_requests_go_on_with_the_new_weights_and_every_token_tells_its_version(url: str, tiny: Any):
    first, second = perturbed(tiny[0], 1), perturbed(tiny[0], 2)
    update_under_load(url, first, "wait", ["settle"])
    sessions = [f"keep-{number}" for number in range(8)]
    version = update_under_load(url, second, "keep", sessions)
    for call in calls_of(url, sessions):
        old, new = call.versions
        assert (old.version, new.version) == (version - 1, version) and 0 < new.start < new.end == 220
        told = torch.tensor(call.logprobs)
        differences = (forward_logprobs(first, call.prompt_ids, call.completion_ids) - told).abs()
        assert differences[: old.end].max() < 1e-4, "tokens of the old version are exactly the old weights' own"
        assert differences[new.start :].max() > 0.01, "those after it are not"
        # Keys of the old weights are still in the cache, and the same prompt must not meet them.
    body = request("v1/completions", temperature=1.0)
    run(post(url, "v1/completions", body, "after-keep"))
    (after,) = run(captured(url, "after-keep"))
    assert mismatch(second, after) < 1e-4 and [span.version for span in after.versions] == [version]


def test_waiting_updates_let_requests_finish_under_the_old_version(url: str, tiny: Any):
    sessions = [f"wait-{number}" for number in range(4)]
    version = update_under_load(url, perturbed(tiny[0], 3), "wait", sessions)
    assert {span.version for call in calls_of(url, sessions) for span in call.versions} == {version - 1}


def test_aborted_requests_start_again_and_are_the_new_weights_own_alone(url: str, tiny: Any):
    model, sessions = perturbed(tiny[0], 4), [f"abort-{number}" for number in range(8)]
    version = update_under_load(url, model, "abort", sessions)
    for call in calls_of(url, sessions):
        assert call.retries == 1 and [span.version for span in call.versions] == [version]
        assert mismatch(model, call) < 1e-4


def test_a_stream_that_has_begun_is_not_aborted(url: str, tiny: Any):
    version = update_under_load(url, perturbed(tiny[0], 5), "abort", ["stream"], stream=True)
    (call,) = calls_of(url, ["stream"])
    assert call.retries == 0 and [span.version for span in call.versions] == [version - 1]


def test_what_the_engine_holds_is_proven_by_the_logprobs_of_a_probe(url: str, tiny: Any):
    model, probe = perturbed(tiny[0], 6), list(range(3, 60))
    expected = forward_logprobs(model, probe[:1], probe[1:]).numpy()

    async def scenario() -> None:
        async with BridgeClient(url) as client:
            await client.publish(dict(model.named_parameters()), (await client.info())["version"] + 1)
            assert await client.verify(probe, expected, tolerance=1e-4) < 1e-4
            stale = forward_logprobs(tiny[0], probe[:1], probe[1:]).numpy()
            with pytest.raises(BridgeError, match="replica 0 does not hold the published weights"):
                await client.verify(probe, stale, tolerance=1e-4)

    run(scenario())


def test_a_broadcast_reaches_the_engine_like_a_file(url: str, tiny: Any):
    model = perturbed(tiny[0], 7)

    async def scenario() -> None:
        async with BridgeClient(url) as client:
            version = (await client.info())["version"] + 1
            await client.publish(dict(model.named_parameters()), version, transport="broadcast")

    run(scenario())
    assert mismatch(model, sampled(url, "broadcast")) < 1e-4


def test_a_paused_bridge_holds_new_requests_until_it_resumes(url: str):
    async def scenario() -> None:
        async with BridgeClient(url) as client:
            await client.pause()
            asked = asyncio.create_task(post(url, "v1/completions", request("v1/completions"), "held"))
            await asyncio.sleep(0.3)
            assert not asked.done()
            await client.resume()
            assert (await asked)[0] == 200

    run(scenario())


def test_samples_come_once_their_session_is_silent(url: str):
    async def scenario() -> list[Any]:
        async with BridgeClient(url) as client:
            await client.take_calls([call for call in ("held", "settle")])
            for number in range(2):
                await post(url, "v1/completions", request("v1/completions", seed=number), f"sample-{number}")
            found = []
            async for sample in client.samples(idle=0.2, poll=0.05):
                found += [sample] if sample.session.startswith("sample-") else []
                if len(found) == 2:
                    return found
        raise AssertionError("unreachable")

    assert {sample.session for sample in run(scenario())} == {"sample-0", "sample-1"}


def test_an_adapter_alone_is_served_under_its_own_name(tiny: Any, tmp_path: Path):
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    base = copy.deepcopy(tiny[0])

    async def scenario(url: str) -> None:
        async with BridgeClient(url) as client:
            for number in range(2):  # the second takes the first one's place
                torch.manual_seed(number)
                adapted = peft.get_peft_model(copy.deepcopy(base), config)
                with torch.no_grad():
                    for name, parameter in adapted.named_parameters():
                        if "lora_" in name:
                            parameter.copy_(0.2 * torch.randn(parameter.shape))
                folder = tmp_path / f"adapter-{number}"
                adapted.save_pretrained(str(folder))
                await client.publish_adapter(folder, 1 + number, "policy")
                session = f"lora-{number}"
                body = {**request("v1/completions"), "model": "policy"}
                status, _ = await post(url, "v1/completions", body, session)
                assert status == 200
                (call,) = (await client.take_calls([session]))[session]
                assert mismatch(adapted, call) < 1e-4 < 0.01 < mismatch(base, call)
                assert [span.version for span in call.versions] == [1 + number]
            with pytest.raises(BridgeError, match="holds no LoRA adapter"):
                await client.publish_adapter(tmp_path, 3, "policy")

    settings = ["--engine.max-model-len", "256", "--engine.lora-rank", "8"]
    with serving(tiny_model_dir(), tmp_path / "bridge", *settings) as url:
        run(scenario(url))
