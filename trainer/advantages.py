"""From the rewards of a group to the advantage of each of its episodes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

EPSILON = 1e-6

AdvantageKind = Literal["mean", "mean_std", "rloo"]


def group_advantages(rewards: Sequence[float], kind: AdvantageKind = "mean") -> np.ndarray:
    """Advantages of one group's episodes, float64 [G]. A group of one, or of equal rewards, gets zeros.

    Args:
        kind: `mean`: `R_i - mean(R)` (Dr. GRPO, arXiv 2503.20783); `mean_std`: that divided by the population standard
            deviation plus 1e-6 (GRPO, arXiv 2402.03300); `rloo`: `R_i` minus the mean of the others (arXiv 2402.14740).

    Raises:
        ValueError: a reward is not finite.
    """
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards}")
    advantages_G = rewards_G - rewards_G.mean()
    if kind == "mean_std":
        return advantages_G / (rewards_G.std() + EPSILON)
    if kind == "rloo" and len(rewards_G) > 1:
        return advantages_G * (len(rewards_G) / (len(rewards_G) - 1))
    return advantages_G
