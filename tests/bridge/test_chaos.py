"""Everything fails at once: 64 sessions, 30 faults, 50 weight updates; nothing is lost, nothing is mixed."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from bridge.client import BridgeClient
from bridge.processes import free_port
from bridge.protocol import BridgeError, ModelCall
from bridge.sequences import samples_from_calls
from tests.bridge.faulty_proxy import FaultyProxy
from tests.bridge.test_updates import perturbed
from tests.conftest import forward_logprobs, run, serving
from trainer.tiny import tiny_model_dir

pytestmark = pytest.mark.engine
MODEL = str(tiny_model_dir())
SESSIONS, FAULTS, UPDATES = 64, 30, 50
KINDS = ("engine", "engine core", "other host", "slow client", "impatient client", "malformed")


class Chaos:
    """What the test does to the bridge, and what it saw."""

    def __init__(self, url: str, bridge: psutil.Process, folder: Path, tiny: Any) -> None:
        self.url, self.bridge, self.folder, self.tiny = url, bridge, folder, tiny
        self.random = random.Random(0)
        self.over = asyncio.Event()
        self.answered: dict[str, int] = {}
        self.errors: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.calls: dict[str, list[ModelCall]] = {}
        self.updates: Counter[str] = Counter()

    async def session(self, worker: int) -> None:
        """Two turns each, the second going on from the first, until all is over."""
        number = 0
        async with aiohttp.ClientSession() as http:
            while not self.over.is_set():
                number += 1
                name, prompt = f"w{worker}-{number}", "1 + 1 = ?"
                for turn in range(2):
                    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
                    headers = {"X-Session-ID": name}
                    async with http.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
                        answer = await response.json()
                    if response.status != 200:
                        assert answer["error"]["message"], "an error must say what happened"
                        self.errors[answer["error"]["message"]] += 1
                        break
                    self.answered[name] = turn + 1
                    prompt += answer["choices"][0]["text"]

    async def publish(self, client: BridgeClient) -> None:
        version = 0
        while version < UPDATES:
            mode = self.random.choice(["wait", "keep", "abort"])
            weights = dict(perturbed(self.tiny[0], version + 1, 0.02).named_parameters())
            try:
                await client.publish(weights, version + 1, mode)  # pyright: ignore[reportArgumentType]
            except BridgeError as error:
                self.updates[str(error)[:60]] += 1
                await asyncio.sleep(0.5)
                continue
            version += 1
            await asyncio.sleep(self.random.uniform(0.2, 0.8))

    async def strike(self, proxy: FaultyProxy, other: list[subprocess.Popen[bytes]]) -> None:
        for number in range(FAULTS):
            kind = KINDS[number % len(KINDS)]
            self.faults[kind] += 1
            if kind in ("engine", "engine core"):
                word = "api_server" if kind == "engine" else "EngineCore"
                for process in self.bridge.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if word in " ".join(process.cmdline()):
                            process.kill()
            elif kind == "other host":
                os.killpg(other[-1].pid, signal.SIGKILL)
                other.append(self.other_host(int(proxy.target.rsplit(":", 1)[1])))
            elif kind == "malformed":
                proxy.faults += 5
            else:
                asyncio.create_task(self.bad_client(2.0 if kind == "slow client" else 0.02))
            await asyncio.sleep(self.random.uniform(0.5, 1.5))

    async def bad_client(self, seconds: float) -> None:
        """Asks for a long stream, hardly reads it, and goes away."""
        body = {"model": MODEL, "prompt": "1", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.post(f"{self.url}/v1/completions", json=body) as response:
                await response.content.read(1)
                await asyncio.sleep(seconds)

    async def collect(self, client: BridgeClient) -> None:
        names = list(self.answered)
        for number in range(0, len(names), 200):
            self.calls |= await client.take_calls(names[number : number + 200])

    def other_host(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bridge", "engine", MODEL, "--port", str(port), "--dtype", "float32"]
        command += ["--cpu-threads", "1", "--max-model-len", "256"]
        log = (self.folder / "other_host.log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


async def chaos(world: Chaos, proxy: FaultyProxy, other: list[Any]) -> Chaos:
    async with BridgeClient(world.url) as client:
        sessions = [asyncio.create_task(world.session(worker)) for worker in range(SESSIONS)]
        async with asyncio.timeout(400):
            await asyncio.gather(world.publish(client), world.strike(proxy, other))
            world.over.set()
            await asyncio.gather(*sessions)
        await world.collect(client)
        assert (await client.info())["version"] == UPDATES
    return world


def test_no_session_is_lost_or_doubled_and_no_token_is_misattributed(tmp_path: Path, tiny: Any):
    port = free_port()
    placeholder = Chaos("", psutil.Process(), tmp_path, tiny)
    other = [placeholder.other_host(port)]
    family: list[psutil.Process] = []

    async def scenario() -> Chaos:
        proxy = FaultyProxy(f"http://127.0.0.1:{port}", seed=1)
        async with proxy.running():
            settings = ["--engine.max-model-len", "256", "--replica-url", proxy.url, "--max-restarts", "100"]
            bridge = serving(MODEL, tmp_path, *settings)
            url = await asyncio.to_thread(bridge.__enter__)
            try:
                process = next(p for p in psutil.Process().children() if str(tmp_path / "url") in p.cmdline())
                try:
                    return await chaos(Chaos(url, process, tmp_path, tiny), proxy, other)
                finally:
                    family.extend([process, *process.children(recursive=True)])
            finally:
                await asyncio.to_thread(bridge.__exit__, None, None, None)

    try:
        world = run(scenario())
    finally:
        for process in other:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert len(world.answered) > SESSIONS
    assert sum(world.faults.values()) == FAULTS
    checked = Counter[str]()
    models: dict[int, Any] = {0: tiny[0]}
    for name, turns in world.answered.items():
        calls = [call for call in world.calls[name] if not call.error]
        assert [call.index for call in calls] == list(range(turns)), "captured once each, in order"
        for sample in samples_from_calls(calls):
            versions = sample.versions[sample.sampled]
            assert (versions[1:] >= versions[:-1]).all(), "versions only rise within a sequence"
        for call in calls:
            spans = {span.version for span in call.versions}
            checked["kept" if len(spans) > 1 else "single"] += 1
            if len(spans) == 1 and checked["single"] % 10 == 0:
                (version,) = spans
                models.setdefault(version, perturbed(tiny[0], version, 0.02))
                expected = forward_logprobs(models[version], call.prompt_ids, call.completion_ids)
                assert (expected - expected.new_tensor(call.logprobs)).abs().max() < 1e-4, (name, call)
    assert {call.replica for calls in world.calls.values() for call in calls} == {0, 1}
    assert sum(call.retries for calls in world.calls.values() for call in calls) > 0
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    time.sleep(0.5)
    left = [path.name for path in Path("/dev/shm").glob("vf-grpo-weights-*")]
    assert not [name for name in left for process in family if name.startswith(f"vf-grpo-weights-{process.pid}-")]
