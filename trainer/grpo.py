"""GRPO with verifiable rewards, top to bottom: `python -m trainer.grpo --env dapo-math [@ configs/RECIPE.toml]`.

Sample groups of episodes from the current policy (Verifiers runs them, vLLM behind the bridge generates, the bridge
captures ids, logprobs and versions), turn rewards into advantages, take one clipped policy-gradient step, put the new
weights into the running vLLM, repeat. The command line and its recipes are in `trainer.cli`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from verifiers.v1.task import Task

from trainer.checkpoint import Checkpoints, forget_partial, load_learner_state, load_progress
from trainer.config import GrpoConfig
from trainer.console import Display
from trainer.data import TaskOrder
from trainer.errors import UserError
from trainer.learner import Learner
from trainer.metrics import episode_metrics, throughput
from trainer.rollouts import Group, VerifiersRollouts
from trainer.runfolder import RunFolder
from trainer.selection import has_spread, select
from trainer.services import Services

MAX_REPLACEMENT_ROUNDS = 5


@dataclass
class Progress:
    """Where the loop is; travels with every checkpoint.

    Args:
        step: optimizer updates done.
        position: tasks handed out so far, see `TaskOrder`.
        seconds: wall time of earlier processes of the same run.
        rewards: held-out (else training) reward by step, as far as measured.
    """

    step: int = 0
    position: int = 0
    seconds: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass
class GrpoRun:
    """One run: its parts, and the loop over them."""

    config: GrpoConfig
    folder: RunFolder
    learner: Learner
    rollouts: VerifiersRollouts
    services: Services
    train_tasks: Sequence[Task]
    validation_tasks: Sequence[Task]
    tokenizer: str
    display: Display
    progress: Progress
    saved_step: int = -1
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.folder.checkpoints, self.config.checkpoint.keep, self.tokenizer)

    async def train(self) -> None:
        """From `progress.step` to `max_steps`."""
        config, progress = self.config, self.progress
        order = TaskOrder(self.train_tasks, config.seed, progress.position)
        if progress.step or config.lora.rank or config.load_format == "dummy":
            await self.publish()
        if progress.step == 0:
            await self.validate()
        while progress.step < config.max_steps:
            step, start = progress.step + 1, time.monotonic()

            groups = await self.sample(order, step)
            waited = time.monotonic() - start

            await uninterrupted(self.update(step, groups, start, waited))
            progress.step, progress.position = step, order.position

            if config.validation.interval and (step % config.validation.interval == 0 or step == config.max_steps):
                await self.validate()
            if step == config.max_steps or (config.checkpoint.interval and step % config.checkpoint.interval == 0):
                await uninterrupted(asyncio.to_thread(self.save))
        await uninterrupted(asyncio.to_thread(self.checkpoints.finish))

    async def sample(self, order: TaskOrder[Task], step: int) -> list[Group]:
        """`prompts_per_step` groups of at least two valid episodes each; a group below that is replaced, and so is, for
        some rounds, one without spread where that is chosen.

        Raises:
            UserError: groups kept failing.
        """
        config = self.config
        groups: list[Group] = []
        for number in range(MAX_REPLACEMENT_ROUNDS + config.zero_spread.max_rounds):
            tasks = order.take(config.prompts_per_step - len(groups))
            fresh = await self.rollouts.sample_groups(tasks, config.samples_per_prompt, (number and number + 1, step))
            picky = config.zero_spread.rule == "resample" and number < config.zero_spread.max_rounds
            groups += [group for group in fresh if len(group.episodes) >= 2 and (has_spread(group) or not picky)]
            if len(groups) == config.prompts_per_step:
                return groups
        raise UserError(
            f"step {step}: only {len(groups)} of {config.prompts_per_step} groups have two valid episodes after "
            f"{MAX_REPLACEMENT_ROUNDS} rounds; see {self.folder.logs}"
        )

    async def update(self, step: int, groups: list[Group], start: float, waited: float) -> None:
        """Advantages, one optimizer step, new weights in the engine, metrics."""
        learner = self.learner
        metrics = episode_metrics(groups, learner.version)
        selection = select(groups, learner.version, self.config)

        batch = learner.batch(selection)
        metrics |= await asyncio.to_thread(learner.step, batch) if batch else learner.skip()

        published = time.monotonic()
        await self.publish()

        now = time.monotonic()
        metrics |= {
            "time/step": now - start,
            "time/wait_rollouts": waited,
            "time/weight_update": now - published,
            "staleness/dropped": selection.stale,
            "truncation/masked": selection.masked,
            "groups/dropped": selection.dropped_groups,
        }
        if batch:
            metrics |= {"tokens/dropped": batch.dropped_tokens}
            metrics |= throughput(batch.trained_tokens, batch.total_tokens, metrics)
        self.folder.log_metrics({"step": step, "version": learner.version, **metrics})
        self.folder.save_episodes(step, groups, selection.by_group)
        self.progress.rewards.setdefault("train_first", metrics["reward/mean"])
        self.progress.rewards["train_last"] = metrics["reward/mean"]
        self.display.step(step, metrics)

    async def publish(self) -> None:
        """The learner's weights, or its adapter alone, into the running engines."""
        learner, bridge = self.learner, self.services.bridge
        if self.config.lora.rank:
            from trainer.lora import save_adapter

            folder = self.folder.path / "adapter"
            await asyncio.to_thread(save_adapter, learner.model, self.config.lora, self.tokenizer, folder)
            await bridge.publish_adapter(folder, learner.version, self.rollouts.model)
        else:
            await bridge.publish(await asyncio.to_thread(learner.weights), learner.version)

    async def validate(self) -> None:
        """Mean reward on the held-out tasks, sampled as in training."""
        if not self.validation_tasks:
            return
        step, settings = self.progress.step, self.config.validation
        self.display.status(f"validating after {step} steps")
        groups = await self.rollouts.sample_groups(self.validation_tasks, settings.samples_per_prompt, (1, step))
        rewards = [episode.reward for group in groups for episode in group.episodes]
        reward = float(np.mean(rewards))
        self.folder.log_metrics({"step": step, "version": self.learner.version, "validation/reward": reward})
        self.progress.rewards.setdefault("validation_first", reward)
        self.progress.rewards["validation_last"] = reward
        self.display.validation(step, reward, len(self.validation_tasks))

    def save(self) -> None:
        """Begin to checkpoint the finished step, unless that was done already or an update broke off in the middle."""
        if self.saved_step != self.progress.step == self.learner.version:
            self.checkpoints.begin(self.progress.step, self.learner, vars(self.progress))
            self.saved_step = self.progress.step

    def restore(self, checkpoint: Path) -> None:
        """Continue exactly where `checkpoint` was written."""
        self.progress = Progress(**load_progress(checkpoint))
        self.saved_step = self.progress.step
        load_learner_state(checkpoint, self.learner)
        forget_partial(self.folder.checkpoints)
        self.folder.forget_after(self.progress.step)


async def uninterrupted(work: Any) -> None:
    """Await `work` to its end even when this task is cancelled meanwhile; the cancellation then goes on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


if __name__ == "__main__":
    from trainer.cli import main

    main()
