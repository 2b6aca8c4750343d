"""Which of a step's episodes are trained on, and with which advantage: spread, truncation and staleness rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge.protocol import Sample
from trainer.advantages import group_advantages
from trainer.config import GrpoConfig, TruncationConfig
from trainer.rollouts import Episode, Group


@dataclass(frozen=True)
class Selection:
    """What of a step's groups goes into the loss.

    Args:
        samples, advantages: the trained sequences and the advantage of each.
        by_group: advantages of all episodes, group by group, for the records; float64 [G] each.
        stale, masked, dropped_groups: sequences left out as too old, as truncated, and groups without spread.
    """

    samples: list[Sample]
    advantages: list[float]
    by_group: list[np.ndarray]
    stale: int = 0
    masked: int = 0
    dropped_groups: int = 0


def has_spread(group: Group) -> bool:
    """Whether the group's rewards differ, so that it teaches something."""
    return len({episode.reward for episode in group.episodes}) > 1


def shaped_reward(episode: Episode, truncation: TruncationConfig, max_tokens: int) -> float:
    """The reward with the soft penalty for long answers (DAPO, arXiv 2503.14476, eq. 13), where that is chosen:
    `min(0, -(length - (L_max - L_buffer)) / L_buffer) * factor`."""
    if truncation.rule != "penalty":
        return episode.reward
    length = sum(sample.response_length for sample in episode.samples)
    over = length - (max_tokens - truncation.penalty_buffer)
    return episode.reward - truncation.penalty_factor * max(0.0, over / truncation.penalty_buffer)


def select(groups: Sequence[Group], version: int, config: GrpoConfig) -> Selection:
    """Advantages of all episodes, and the sequences that are trained.

    Args:
        version: the trainer's policy version.
    """
    samples: list[Sample] = []
    advantages: list[float] = []
    by_group = []
    stale = masked = dropped = 0
    for group in groups:
        rewards = [shaped_reward(e, config.truncation, config.sampling.max_tokens) for e in group.episodes]
        values = group_advantages(rewards, config.advantage.kind)
        by_group.append(values)
        if config.zero_spread.rule == "drop" and len(set(rewards)) == 1:
            dropped += 1
            continue
        for episode, advantage in zip(group.episodes, values, strict=True):
            for sample in episode.samples:
                if version - sample.oldest_version > config.max_off_policy_steps:
                    stale += 1
                elif config.truncation.rule == "mask" and episode.truncated:
                    masked += 1
                else:
                    samples.append(sample)
                    advantages.append(float(advantage))
    return Selection(samples, advantages, by_group, stale, masked, dropped)
