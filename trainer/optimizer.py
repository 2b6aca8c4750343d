"""The optimizer and its learning-rate schedule."""

import math
from collections.abc import Iterable

import torch

from trainer.config import OptimizerConfig
from trainer.errors import UserError


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW on the trainable parameters; vectors (norms, biases) are not decayed.

    Raises:
        UserError: `adamw_8bit` without torchao.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.kind == "adamw_8bit":
        try:
            from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError('optimizer.kind = "adamw_8bit" needs torchao: pip install torchao') from error
        return AdamW8bit(groups, lr=learning_rate, betas=config.betas, weight_decay=0.0)
    fused = trainable[0].is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=config.betas, weight_decay=0.0, fused=fused)


def learning_rate(config: OptimizerConfig, peak: float, step: int, steps: int) -> float:
    """The rate of update `step` (from 1) of `steps`: a linear rise over `warmup_steps`, then the schedule.

    `constant` stays; `cosine` falls to `final_share` of the peak over the rest; `wsd` (warm-up, stable, decay; arXiv
    2404.06395) stays and falls linearly over the last `decay_steps`.
    """
    if step <= config.warmup_steps:
        return peak * step / (config.warmup_steps + 1)
    if config.schedule == "cosine":
        done = (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps - 1)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return peak * (config.final_share + (1 - config.final_share) * cosine)
    if config.schedule == "wsd":
        left = (steps - step + 1) / max(1, config.decay_steps)
        return peak * (config.final_share + (1 - config.final_share) * min(1.0, left))
    return peak
