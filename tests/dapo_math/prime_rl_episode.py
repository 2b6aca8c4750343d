"""Runs one episode of an evaluation source through prime-rl's own orchestrator client, and prints it as JSON.

python prime_rl_episode.py CONFIG ADDRESS MODEL_URL: CONFIG is the orchestrator's, as `rl --dry-run` writes it.
"""
# This file runs in prime-rl's environment.
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from pathlib import Path

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.envs import EvalEnv
from prime_rl.utils.client import setup_client
from prime_rl.utils.logger import setup_logger


async def main(file: str, address: str, url: str) -> None:
    setup_logger("info")
    config = OrchestratorConfig.model_validate(json.loads(Path(file).read_text()))
    environment = EvalEnv(config.eval.source[0], address)
    await environment.start()
    client = setup_client(ClientConfig(base_url=url, api_key_var="NONE"))
    task = environment.examples[0]
    episode = await environment.run(client, "m", None, task.data.model_dump(mode="json"))
    (trace,) = episode.traces
    fields = {"ok": episode.ok, "reward": trace.reward, "metrics": trace.metrics, "answer": task.data.answer}
    print(json.dumps({**fields, "tasks": environment.num_tasks}))


asyncio.run(main(*sys.argv[1:]))
