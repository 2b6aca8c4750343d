"""From the rewards of a group to the advantage of each of its episodes."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool) -> np.ndarray:
    """Advantages of one group's episodes, float64 [G].

    `A_i = R_i - mean(R)` (Dr. GRPO, arXiv 2503.20783), divided by the population standard deviation plus 1e-6 where
    `divide_by_std` (GRPO, arXiv 2402.03300). A group of one, or of equal rewards, gets zeros.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards must be finite, got {rewards}")
    advantages_G = rewards_G - rewards_G.mean()
    if divide_by_std:
        advantages_G = advantages_G / (rewards_G.std() + EPSILON)
    return advantages_G
