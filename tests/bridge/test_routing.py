"""Which replica takes a request, who waits, who is turned away; with engines that answer at once."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bridge.client import BridgeClient
from bridge.processes import free_port
from bridge.protocol import BridgeError
from tests.bridge.test_serving import post
from tests.conftest import run, start


@contextlib.contextmanager
def stub(port: int, version: str = "0.32.0") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "tests.stub_engine", str(port), version])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def started(folder: Path, ports: list[int], *settings: str) -> tuple[subprocess.Popen[bytes], Path]:
    ready = folder / "url"
    command = [sys.executable, "-m", "bridge", "serve", "m", "--replicas", "0", "--port", "0"]
    command += ["--ready-file", str(ready), *settings]
    for port in ports:
        command += ["--replica-url", f"http://127.0.0.1:{port}"]
    return start(command, folder / "bridge.log"), ready


@contextlib.contextmanager
def bridged(folder: Path, ports: list[int], *settings: str) -> Iterator[str]:
    """A bridge in front of stub engines on `ports`."""
    process, ready = started(folder, ports, *settings)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "bridge.log").read_text()
            time.sleep(0.05)
        yield ready.read_text()
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[str]:
    """Two stub replicas with room for two requests each, and a queue of two."""
    ports = [free_port(), free_port()]
    with stub(ports[0]), stub(ports[1]):
        settings = ["--engine.max-num-seqs", "2", "--max-queued", "2", "--max-request-mib", "0.01"]
        with bridged(tmp_path, ports, *settings) as url:
            yield url


def completion(delay_ms: int = 0) -> dict[str, Any]:
    return {"model": "m", "prompt": "1", "max_tokens": 3, "seed": delay_ms}


async def replicas_of(url: str, sessions: list[str]) -> list[list[int]]:
    async with BridgeClient(url) as client:
        taken = await client.take_calls(sessions)
    return [[call.replica for call in taken[session]] for session in sessions]


def test_requests_go_to_the_least_loaded_replica(two: str):
    async def scenario() -> list[list[int]]:
        names = [f"s{number}" for number in range(4)]
        await asyncio.gather(*(post(two, "v1/completions", completion(300), name) for name in names))
        return await replicas_of(two, names)

    assert sorted(replica for (replica,) in run(scenario())) == [0, 0, 1, 1]


def test_a_session_stays_with_its_replica(two: str):
    async def scenario() -> list[list[int]]:
        for _ in range(6):
            await asyncio.gather(*(post(two, "v1/completions", completion(20), name) for name in ("a", "b")))
        return await replicas_of(two, ["a", "b"])

    a, b = run(scenario())
    assert len(set(a)) == len(set(b)) == 1 and a[0] != b[0]


def test_a_full_queue_answers_429_and_the_rest_is_served(two: str):
    async def scenario() -> list[tuple[int, Any]]:
        return await asyncio.gather(
            *(post(two, "v1/completions", completion(500), f"q{number}") for number in range(8))
        )

    answers = run(scenario())
    assert [status for status, _ in answers].count(429) == 2 and [status for status, _ in answers].count(200) == 6
    (message, _) = [answer["error"]["message"] for status, answer in answers if status == 429]
    assert "max_queued" in message


def test_a_request_that_is_too_large_is_refused(two: str):
    status, answer = run(post(two, "v1/completions", {**completion(), "prompt": "1" * 20_000}))
    assert status == 413 and "max_request_mib" in answer["error"]["message"]


def test_without_a_replica_requests_wait_until_one_is_back(tmp_path: Path):
    port = free_port()
    engine = contextlib.ExitStack()
    process = engine.enter_context(stub(port))
    with bridged(tmp_path, [port]) as url:

        async def scenario() -> tuple[int, Any]:
            process.kill()
            asked = asyncio.create_task(post(url, "v1/completions", completion(), "patient"))
            await asyncio.sleep(1.0)
            assert not asked.done()
            async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
                assert response.status == 503
            with stub(port):
                return await asyncio.wait_for(asked, 30)

        assert run(scenario())[0] == 200
    engine.close()


def test_a_replica_that_stays_away_is_given_up_and_the_bridge_ends_with_the_reason(tmp_path: Path):
    port = free_port()
    with stub(port) as process:
        bridge, ready = started(tmp_path, [port], "--max-restarts", "1", "--engine.start-timeout", "1")
        while not ready.exists():
            time.sleep(0.05)
        process.kill()
        asyncio.run(_ask_once(ready.read_text()))
        assert bridge.wait(60) == 1
    log = (tmp_path / "bridge.log").read_text()
    assert "given up after 1 restarts (max_restarts)" in log and "error: the vLLM server at http://127.0.0.1" in log


async def _ask_once(url: str) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        await post(url, "v1/completions", completion())


@pytest.mark.parametrize(("version", "works"), [("0.33.1", True), ("0.99.0", True), ("0.26.0", False)])
def test_the_adapter_follows_the_servers_version_and_the_probe_decides(tmp_path: Path, version: str, works: bool):
    # The stub answers in the shape of 0.32 and later.
    port = free_port()
    with stub(port, version):
        bridge, ready = started(tmp_path, [port])
        deadline = time.monotonic() + 30
        while not ready.exists() and bridge.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ready.exists() == works, (tmp_path / "bridge.log").read_text()
        bridge.terminate()
        bridge.wait(60)
    if not works:
        assert f"the vLLM {version} server does not answer as the bridge needs" in (tmp_path / "bridge.log").read_text()


def test_an_api_key_guards_everything_but_health(tmp_path: Path):
    port = free_port()
    with stub(port), bridged(tmp_path, [port], "--api-key", "secret") as url:

        async def scenario() -> None:
            async with aiohttp.ClientSession() as http:
                for path, status in (("/health", 200), ("/v1/models", 401), ("/bridge/info", 401)):
                    async with http.get(url + path) as response:
                        assert response.status == status
                headers = {"Authorization": "Bearer secret"}
                async with http.get(f"{url}/v1/models", headers=headers) as response:
                    assert response.status == 200
                async with http.get(f"{url}/v1/models", headers={"X-Api-Key": "secret"}) as response:
                    assert response.status == 200
            with pytest.raises(BridgeError, match="api_key"):
                async with BridgeClient(url):
                    pass
            async with BridgeClient(url, api_key="secret") as client:
                assert (await client.info())["version"] == 0

        run(scenario())


def test_a_server_that_was_not_started_for_the_bridge_is_refused_with_the_way_out(tmp_path: Path):
    port = free_port()
    code = (
        "from tests.stub_engine import *\n"
        "class Plain(StubEngine):\n"
        "    def answer(self, path, *rest): super().answer(path.replace('/bridge/', '/none/'), *rest)\n"
        "import tests.stub_engine as s; s.StubEngine = Plain; asyncio.run(main(int(sys.argv[1])))\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code, str(port)])
    try:
        bridge, _ = started(tmp_path, [port])
        assert bridge.wait(60) == 1
        assert "start it with `python -m bridge engine MODEL" in (tmp_path / "bridge.log").read_text()
    finally:
        server.kill()
        server.wait()


def test_nothing_of_a_requests_text_is_logged(tmp_path: Path):
    port = free_port()
    with stub(port), bridged(tmp_path, [port]) as url:
        run(post(url, "v1/completions", {**completion(), "prompt": "a secret"}, "quiet"))
        run(post(url, "v1/nothing", {"prompt": "a secret"}))
    assert "a secret" not in (tmp_path / "bridge.log").read_text()
