import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bridge.protocol import BridgeError
from bridge.weights import VersionGate, WeightDirectory, write_weights


def test_requests_see_the_version_they_were_let_in_under_and_updates_wait_for_them():
    async def scenario():
        gate, log = VersionGate(), []

        async def request(name: str, seconds: float):
            async with gate.request() as version:
                log.append((name, version))
                await asyncio.sleep(seconds)
                assert gate.version == version, "the weights changed under a request"

        early = asyncio.create_task(request("early", 0.05))
        await asyncio.sleep(0)

        async def update():
            async with gate.update(1, timeout=5):
                assert early.done()
                await asyncio.sleep(0.02)

        updating = asyncio.create_task(update())
        await asyncio.sleep(0)
        late = asyncio.create_task(request("late", 0))
        await asyncio.gather(early, updating, late)
        assert log == [("early", 0), ("late", 1)]

    asyncio.run(scenario())


def test_a_failed_update_keeps_the_old_version_and_lets_requests_pass_again():
    async def scenario():
        gate = VersionGate(3)
        with pytest.raises(RuntimeError, match="boom"):
            async with gate.update(4, timeout=1):
                raise RuntimeError("boom")
        async with gate.request() as version:
            assert version == 3

    asyncio.run(scenario())


def test_versions_only_rise():
    async def scenario():
        with pytest.raises(BridgeError, match="versions only rise"):
            async with VersionGate(3).update(3, timeout=1):
                pass

    asyncio.run(scenario())


def test_an_update_that_cannot_drain_says_how_many_requests_it_waited_for():
    async def scenario():
        gate = VersionGate()
        async with gate.request():
            with pytest.raises(BridgeError, match="1 requests were still running"):
                async with gate.update(1, timeout=0.01):
                    pass

    asyncio.run(scenario())


def test_weights_travel_with_a_checksum_of_every_tensor(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    write_weights([("a", torch.ones(3)), ("b", torch.zeros(2, 2, dtype=torch.bfloat16))], path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"a", "b"}
        assert torch.equal(file.get_tensor("a"), torch.ones(3))


def test_the_weight_folder_goes_with_its_owner_and_so_do_those_of_dead_owners():
    first = WeightDirectory()
    stale = first.path.parent / "vf-grpo-weights-999999999-left"
    stale.mkdir()
    second = WeightDirectory()
    assert not stale.exists()
    assert first.path.exists(), "a living owner's folder must stay"
    assert str(os.getpid()) in first.path.name
    first.close()
    second.close()
    assert not first.path.exists() and not second.path.exists()
