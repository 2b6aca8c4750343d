"""The numbers of a step that come from its episodes."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from trainer.rollouts import Episode, Group

FAILURE_CAUSES = ("environment", "engine", "verifier_timeout")


def episode_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards, lengths, staleness and failures of a step's groups.

    Args:
        version: the trainer's policy version when it takes the episodes.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    samples = [sample for episode in episodes for sample in episode.samples]
    lengths = [sum(sample.response_length for sample in episode.samples) for episode in episodes]
    staleness = [version - sample.oldest_version for sample in samples if sample.response_length]
    failures: Counter[str] = sum((group.failures for group in groups), Counter())
    rewards = np.asarray([episode.reward for episode in episodes])
    equal = [group.episodes[0].reward for group in groups if len({e.reward for e in group.episodes}) == 1]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "truncation_rate": np.mean([episode.truncated for episode in episodes]),
        "response_length/mean": np.mean(lengths),
        "response_length/max": np.max(lengths),
        "groups/all_wrong": sum(reward <= 0 for reward in equal) / len(groups),
        "groups/all_right": sum(reward > 0 for reward in equal) / len(groups),
        "staleness/mean": np.mean(staleness),
        "staleness/max": np.max(staleness),
        "time/decode_ms": 1000 * np.mean([sum(sample.latency for sample in e.samples) for e in episodes]),
    }
    metrics |= {f"reward/{name}": value for name, value in _means(episodes, "rewards").items()}
    metrics |= _means(episodes, "metrics")
    metrics |= {f"failures/{cause}": failures[cause] for cause in FAILURE_CAUSES}
    return {name: float(value) for name, value in metrics.items()}


def _means(episodes: Sequence[Episode], attribute: str) -> dict[str, float]:
    """Mean of every named number, over the episodes that have it."""
    names = dict.fromkeys(name for episode in episodes for name in getattr(episode, attribute))
    return {
        name: float(np.mean([getattr(e, attribute)[name] for e in episodes if name in getattr(e, attribute)]))
        for name in names
    }


def throughput(response_tokens: int, all_tokens: int, times: dict[str, float]) -> dict[str, float]:
    """Tokens per second; `times` holds `time/step`, `time/forward_backward` and `time/optimizer` in seconds."""
    learning = times["time/forward_backward"] + times["time/optimizer"]
    return {
        "throughput/step": response_tokens / times["time/step"],
        "throughput/forward_backward": response_tokens / learning,
        "throughput/all_tokens": all_tokens / learning,
    }
