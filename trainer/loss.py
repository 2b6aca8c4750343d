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
    weights_T: torch.Tensor,
    config: LossConfig,
    reference_T: torch.Tensor | None = None,
) -> LossTerms:
    """The clipped objective (DAPO, arXiv 2503.14476, eq. 8) with a dual clip (arXiv 1912.09729).

    With p the trainer's logprob, o the old policy's and r = exp(p - o):
    `L = -sum w c min(r A, clip(r, 1 - low, 1 + high) A)`, and where A < 0 no `min` falls below `dual_clip * A`. The
    weights w hold the normalization (`trainer.batch`), so any split into micro-batches gives the same gradient.

    - `old_policy = bypass`: o = q, the behaviour policy's logprob, and c = 1.
    - `old_policy = decoupled`: o = p at batch time (r is 1, and carries the gradient); c corrects for q: TIS
      `min(exp(o - q), cap)` (arXiv 2510.18855 calls its masked form IcePop: c = 0 outside a band).
    - `kl_coef` adds `sum w (exp(s - p) - (s - p) - 1)` to the reference policy s (GRPO, arXiv 2402.03300, eq. 4).

    Args:
        logprobs_T: the trainer's logprobs p, float32 or float64 with gradient, [T].
        behaviour_T: the engine's logprobs q of the same tokens, finite, [T].
        advantages_T: the advantage of each token's episode, [T].
        weights_T: each token's share in the loss, [T].
        reference_T: the reference policy's logprobs s, [T].
    """
    bypass = config.old_policy == "bypass"
    old_T = behaviour_T if bypass else logprobs_T.detach()
    ratio_T = torch.exp((logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    floor_T = config.dual_clip * advantages_T
    dual_T = (advantages_T < 0) & (objective_T < floor_T)
    objective_T = torch.where(dual_T, floor_T, objective_T)
    with torch.no_grad():
        mismatch_T = logprobs_T - behaviour_T
        clamped_T = mismatch_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        importance_T = torch.exp(clamped_T)
        correction_T, corrected_T = _correction(importance_T, config)
    loss = -(weights_T * correction_T * objective_T).sum()
    sums = {}
    if reference_T is not None:
        difference_T = reference_T - logprobs_T
        kl_T = torch.expm1(difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - difference_T
        loss = loss + config.kl_coef * (weights_T * kl_T).sum()
        sums["kl/reference"] = kl_T.detach().sum()
    with torch.no_grad():
        sums |= {
            "clip/low": ((advantages_T < 0) & (ratio_T < 1 - config.clip_low)).sum(),
            "clip/high": ((advantages_T > 0) & (ratio_T > 1 + config.clip_high)).sum(),
            "clip/dual": dual_T.sum(),
            "importance/corrected": corrected_T.sum(),
            "ratio/mean": importance_T.sum(),
            "mismatch/k1": -mismatch_T.sum(),
            "mismatch/k3": (torch.expm1(clamped_T) - mismatch_T).sum(),
            "mismatch/abs_mean": mismatch_T.abs().sum(),
        }
        maxima = {"ratio/max": _largest(importance_T), "mismatch/abs_max": _largest(mismatch_T.abs())}
    return LossTerms(loss, sums, maxima)


def _largest(values_T: torch.Tensor) -> torch.Tensor:
    """The maximum of numbers that are not negative; 0 where a rank has no tokens."""
    return values_T.max() if len(values_T) else values_T.new_zeros(())


def _correction(importance_T: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """c of every token, and where it is not the plain importance weight."""
    if config.old_policy == "bypass":
        return torch.ones_like(importance_T), torch.zeros_like(importance_T, dtype=torch.bool)
    if config.correction == "tis":
        return importance_T.clamp(max=config.tis_cap), importance_T > config.tis_cap
    outside_T = (importance_T < config.icepop_low) | (importance_T > config.icepop_high)
    return torch.where(outside_T, torch.zeros_like(importance_T), importance_T), outside_T
