"""Runs the `verifiers_rl` recipe of tinker-cookbook as its command does; only Tinker's service is replaced.

python tinker_recipe.py MODEL_FOLDER right|fault ARGUMENT=VALUE ...: prints one JSON object about one group of two.
"""
# This file runs in a virtual environment of its own, with Verifiers 0.1.9.
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import chz
import dapo_math.v0
import numpy as np
import tinker
from tinker_cookbook.recipes.verifiers_rl import train as recipe
from tinker_cookbook.rl import rollouts, train
from transformers import AutoTokenizer

folder, mode, *arguments = sys.argv[1:]
settings = chz.entrypoint(recipe.CLIConfig, argv=arguments)
tokenizer: Any = AutoTokenizer.from_pretrained(folder)


class Sampler:
    """Stands where Tinker's remote sampler stands, and gives the replies in turn."""

    def __init__(self, replies: list[str]) -> None:
        self.replies = iter(replies)

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1 and sampling_params.max_tokens == settings.max_tokens
        tokens = np.array(tokenizer.encode(next(self.replies), add_special_tokens=False))
        logprobs = np.full(len(tokens), -0.5)
        return tinker.SampleResponse([tinker.SampledSequence("stop", "0", tokens_np=tokens, logprobs_np=logprobs)])


async def broken(*_: Any, **__: Any) -> Any:
    raise dapo_math.CheckerError("the checker is gone")


async def one_group(config: Any) -> None:
    """What the training loop asks of the recipe: the dataset, a batch of group builders, the rollouts of a group."""
    dataset, _ = await config.dataset_builder()
    builder = dataset.get_batch(0)[0]
    if mode == "fault":
        dapo_math.v0.agrade = broken
    sampler = Sampler([f"\\boxed{{{builder.answer}}}\n\nUser:", "\\boxed{x}\n\nUser:"])
    try:
        group = await rollouts.do_group_rollout(builder, SimpleNamespace(sampling_client=sampler))
    except dapo_math.CheckerError as error:
        print(json.dumps({"error": str(error)}))
        return
    steps = [step for trajectory in group.trajectories_G for step in trajectory.transitions]
    result = {
        "rows": len(dataset.rows),
        "answer": builder.answer,
        "rewards": group.final_rewards_G,
        "metrics": group.metrics_G,
        "replies": [tokenizer.decode(step.ac.tokens) for step in steps],
        "logprobs": [step.ac.logprobs for step in steps],
        "prompts": [tokenizer.decode(step.ob.to_ints()) for step in steps],
    }
    print(json.dumps(result))


train.main = one_group
asyncio.run(recipe.cli_main(settings, None))
