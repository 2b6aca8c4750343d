import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bridge.gate import Interrupted, VersionGate
from bridge.processes import free_port
from bridge.protocol import BridgeError
from bridge.transfer import checksum, receive_broadcast, send_broadcast, sums, write_file
from bridge.weights import WeightDirectory
from tests.conftest import run


def test_requests_see_the_version_they_were_let_in_under_and_updates_wait_for_them():
    async def scenario():
        gate, log = VersionGate(), []

        async def request(name: str, seconds: float):
            async with gate.request(0) as flight:
                log.append((name, flight.version))
                await asyncio.sleep(seconds)
                assert gate.version == flight.version, "the weights changed under a request"

        early = asyncio.create_task(request("early", 0.05))
        await asyncio.sleep(0)

        async def update():
            async with gate.update(1, "wait", timeout=5):
                assert early.done()
                await asyncio.sleep(0.02)

        updating = asyncio.create_task(update())
        await asyncio.sleep(0)
        late = asyncio.create_task(request("late", 0))
        await asyncio.gather(early, updating, late)
        assert log == [("early", 0), ("late", 1)]

    run(scenario())


def test_an_aborting_update_interrupts_requests_unless_their_client_has_seen_a_part():
    async def scenario():
        gate, log = VersionGate(), []

        async def request(name: str, sent: bool):
            try:
                async with gate.request(0) as flight:
                    flight.sent = sent
                    await asyncio.sleep(0.05)
                    log.append((name, "done"))
            except Interrupted as reason:
                log.append((name, str(reason)))

        running = [asyncio.create_task(request("whole", False)), asyncio.create_task(request("stream", True))]
        await asyncio.sleep(0)
        async with gate.update(1, "abort", timeout=5):
            assert log == [("whole", "overtaken by version 1"), ("stream", "done")]
        await asyncio.gather(*running)

    run(scenario())


def test_a_keeping_update_leaves_requests_inside_and_holds_new_ones():
    async def scenario():
        gate, entered = VersionGate(), []

        async def request():
            async with gate.request(0) as flight:
                entered.append(flight.version)
                await asyncio.sleep(0.05)

        first = asyncio.create_task(request())
        await asyncio.sleep(0)
        async with gate.update(1, "keep", timeout=5):
            second = asyncio.create_task(request())
            await asyncio.sleep(0.01)
            assert not first.done() and entered == [0]
        await asyncio.gather(first, second)
        assert entered == [0, 1]

    run(scenario())


def test_a_failed_update_keeps_the_old_version_and_lets_requests_pass_again():
    async def scenario():
        gate = VersionGate(3)
        with pytest.raises(RuntimeError, match="boom"):
            async with gate.update(4, "wait", timeout=1):
                raise RuntimeError("boom")
        async with gate.request(0) as flight:
            assert flight.version == 3

    run(scenario())


def test_a_paused_gate_stays_closed_over_an_update():
    async def scenario():
        gate = VersionGate()
        gate.pause()
        async with gate.update(1, "wait", timeout=1):
            pass
        entering = asyncio.create_task(gate.request(0).__aenter__())
        await asyncio.sleep(0.02)
        assert not entering.done()
        gate.resume()
        assert (await entering).version == 1

    run(scenario())


def test_an_update_that_cannot_drain_says_how_many_requests_it_waited_for():
    async def scenario():
        gate = VersionGate()
        async with gate.request(0):
            with pytest.raises(BridgeError, match="1 requests were still running"):
                async with gate.update(1, "wait", timeout=0.01):
                    pass

    run(scenario())


def test_weights_travel_with_a_checksum_of_every_tensor(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    write_file(tensors, path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {name: checksum(tensor) for name, tensor in tensors.items()}
        assert torch.equal(file.get_tensor("a"), torch.ones(3))


def test_sums_see_a_single_bit():
    tensor = torch.randn(1000)
    changed = tensor.clone()
    changed.view(torch.int32)[500] ^= 1
    assert sums({"t": tensor}) != sums({"t": changed})


def test_a_broadcast_brings_every_tensor_to_every_rank():
    tensors = {"a": torch.randn(300, 7), "b": torch.randn(5).bfloat16(), "c": torch.arange(3)}
    layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
    address = f"127.0.0.1:{free_port()}"

    async def scenario():
        return await asyncio.gather(
            asyncio.to_thread(send_broadcast, address, 3, "gloo", tensors),
            asyncio.to_thread(receive_broadcast, address, 3, 1, "gloo", layout),
            asyncio.to_thread(receive_broadcast, address, 3, 2, "gloo", layout),
        )

    _, one, two = run(scenario())
    for received in (one, two):
        assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


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
