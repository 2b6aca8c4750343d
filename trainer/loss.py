"""The policy loss on per-token streams, and what it says about itself."""

from dataclasses import dataclass

import torch

from trainer.config import LossConfig

MAX_LOG_RATIO = 10.0


@dataclass
class LossTerms:
    """Sums over the T trained tokens of one micro-batch; divided by the batch's token count they become metrics.

    Args:
        loss: the micro-batch's share of the loss, differentiable scalar.
        sums: detached scalars by metric name, to be summed over micro-batches and divided by N.
        maxima: detached scalars by metric name, to be maximized over micro-batches.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def policy_loss(
    logprobs_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    advantages_T: torch.Tensor,
    token_count: int,
    config: LossConfig,
) -> LossTerms:
    """DAPO's token-mean clipped loss (arXiv 2503.14476, eq. 8) with a dual clip (arXiv 1912.09729).

    With p the trainer's logprob, q the behaviour policy's and r = exp(p - q):
    `L = -1/N sum min(r A, clip(r, 1 - low, 1 + high) A)`, and where A < 0 no term exceeds `c |A|`.

    Args:
        logprobs_T: the trainer's logprobs p, float32 with gradient, [T].
        behaviour_T: the engine's logprobs q of the same tokens, float32, finite, [T].
        advantages_T: the advantage of each token's episode, float32 [T].
        token_count: N, trained tokens in the whole batch, so that any split into micro-batches gives the same gradient.
    """
    log_ratio_T = logprobs_T - behaviour_T
    clamped_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = torch.exp(clamped_T)
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    floor_T = config.dual_clip * advantages_T
    dual_T = (advantages_T < 0) & (objective_T < floor_T)
    objective_T = torch.where(dual_T, floor_T, objective_T)
    loss = -objective_T.sum() / token_count
    with torch.no_grad():
        low_T = (advantages_T < 0) & (ratio_T < 1 - config.clip_low)
        high_T = (advantages_T > 0) & (ratio_T > 1 + config.clip_high)
        sums = {
            "clip/low": low_T.sum(),
            "clip/high": high_T.sum(),
            "clip/dual": dual_T.sum(),
            "ratio/mean": ratio_T.sum(),
            "mismatch/k1": -log_ratio_T.sum(),
            "mismatch/k3": (torch.expm1(clamped_T) - log_ratio_T).sum(),
            "mismatch/abs_mean": log_ratio_T.abs().sum(),
        }
        maxima = {"ratio/max": ratio_T.max(), "mismatch/abs_max": log_ratio_T.abs().max()}
    return LossTerms(loss, sums, maxima)
