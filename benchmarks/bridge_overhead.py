"""What the bridge costs: added latency, requests a second and memory, in front of an engine that answers at once.

    python benchmarks/bridge_overhead.py [--calls 100000] [--save]

Stub engine, bridge and load (this process) share the machine's cores. Every figure is taken directly and through the
bridge in the same run, with the same client.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from record import record

from bridge.processes import free_port

PROMPT, COMPLETION = 64, 32
BODY = {"token_ids": list(range(PROMPT)), "sampling_params": {"max_tokens": COMPLETION, "temperature": 1.0}}
ROOT = Path(__file__).parents[1]


async def ask(http: aiohttp.ClientSession, url: str, session: str) -> None:
    headers = {"X-Session-ID": session}
    async with http.post(f"{url}/inference/v1/generate", json=BODY, headers=headers) as response:
        assert response.status == 200
        await response.read()


async def latencies(http: aiohttp.ClientSession, url: str, count: int) -> np.ndarray:
    """Milliseconds of `count` requests, one after the other."""
    found = []
    for number in range(count):
        start = time.perf_counter()
        await ask(http, url, f"latency-{number}")
        found.append(1000 * (time.perf_counter() - start))
    return np.asarray(found)


async def throughput(http: aiohttp.ClientSession, url: str, count: int, at_once: int = 64) -> float:
    """Requests a second with `at_once` under way; captured calls are picked up as a trainer would."""
    numbers = iter(range(count))

    async def worker() -> None:
        taken: list[str] = []
        for number in numbers:
            await ask(http, url, f"s{number}")
            taken.append(f"s{number}")
            if len(taken) == 64 and bridged:
                await take(http, url, taken)
                taken.clear()
        if bridged:
            await take(http, url, taken)

    bridged = (await http.get(f"{url}/bridge/info")).status == 200
    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return count / (time.perf_counter() - start)


async def take(http: aiohttp.ClientSession, url: str, sessions: list[str]) -> None:
    async with http.post(f"{url}/bridge/calls", json={"sessions": sessions}) as response:
        assert response.status == 200
        await response.read()


async def measure(direct: str, url: str, bridge: psutil.Process, calls: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await throughput(http, url, 2000)
        plain, through = [], []
        for _ in range(5):  # in turn, for the machine is shared
            plain.append(await latencies(http, direct, 400))
            through.append(await latencies(http, url, 400))
        alone, bridged = np.concatenate(plain), np.concatenate(through)
        direct_rate = await throughput(http, direct, 10_000)
        rate = await throughput(http, url, 10_000)
        before = bridge.memory_info().rss
        await throughput(http, url, calls)
        grown = bridge.memory_info().rss - before
    return {
        "added_ms_p50": round(float(np.median(bridged) - np.median(alone)), 3),
        "added_ms_p99": round(float(np.quantile(bridged, 0.99) - np.quantile(alone, 0.99)), 3),
        "direct_ms_p50": round(float(np.median(alone)), 3),
        "requests_per_s": round(rate, 1),
        "direct_requests_per_s": round(direct_rate, 1),
        "ratio_to_direct": round(rate / direct_rate, 3),
        "memory_growth_mib": round(grown / 2**20, 1),
        "memory_calls": calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000, help="requests over which memory must stay flat")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args()
    port = free_port()
    stub = subprocess.Popen([sys.executable, "-m", "tests.stub_engine", str(port)], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "url")
        command = [sys.executable, "-m", "bridge", "serve", "m", "--replicas", "0", "--port", "0"]
        command += ["--replica-url", f"http://127.0.0.1:{port}", "--ready-file", str(ready)]
        bridge = subprocess.Popen(command, cwd=ROOT)
        try:
            while not ready.exists():
                assert bridge.poll() is None, "the bridge did not start"
                time.sleep(0.1)
            process = psutil.Process(bridge.pid)
            results = asyncio.run(measure(f"http://127.0.0.1:{port}", ready.read_text(), process, args.calls))
        finally:
            bridge.terminate()
            stub.kill()
            bridge.wait()
    record("bridge_overhead", results, ["aiohttp", "msgspec", "uvloop"], args.save)


if __name__ == "__main__":
    main()
