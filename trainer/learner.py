"""The learning side of a run: model, optimizer, and one update from one batch."""

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.batch import Batch
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.loss import policy_loss
from trainer.model import DTYPES, load_model, token_logprobs


class Learner:
    """Holds the float32 weights and the optimizer; `version` counts the updates behind them.

    Weights stay in float32 whatever `dtype` computes in: a step of 1e-6 would round to nothing in bfloat16.
    """

    def __init__(self, config: GrpoConfig, model_path: str | Path) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(model_path, self.device)
        self.dtype = DTYPES[config.dtype]
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": vectors}],
            lr=config.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=0.0,
        )
        self.version = 0

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer update; the metrics of `algorithm` names, times in seconds.

        Raises:
            UserError: before the update, engine and trainer disagree on the same weights beyond `max_mismatch`, or the
                gradient is not finite.
        """
        start = time.monotonic()
        sums: defaultdict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for micro in batch.micro_batches:
            micro = micro.to(self.device)
            logprobs_T, entropy_T = token_logprobs(self.model, micro, self.dtype)
            terms = policy_loss(
                logprobs_T,
                micro.behaviour_RL[micro.trained_RL],
                micro.advantages_RL[micro.trained_RL],
                batch.trained_tokens,
                self.config.loss,
            )
            terms.loss.backward()
            sums["loss"] += float(terms.loss.detach()) * batch.trained_tokens
            sums["entropy"] += float(entropy_T.sum())
            for name, value in terms.sums.items():
                sums[name] += float(value)
            for name, value in terms.maxima.items():
                maxima[name] = max(maxima.get(name, 0.0), float(value))
        metrics = {name: value / batch.trained_tokens for name, value in sums.items()} | maxima
        forward_backward = time.monotonic() - start
        self._check(metrics)
        lr = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise UserError(f"the gradient of update {self.version + 1} is not finite; lower learning_rate")
        self.optimizer.step()
        self.version += 1
        optimizer = time.monotonic() - start - forward_backward
        return metrics | {
            "grad_norm": float(grad_norm),
            "lr": lr,
            "time/forward_backward": forward_backward,
            "time/optimizer": optimizer,
        }

    def _check(self, metrics: dict[str, float]) -> None:
        limit = self.config.max_mismatch
        if not metrics["mismatch/k3"] <= limit:
            raise UserError(
                f"engine and trainer disagree about the weights of policy version {self.version}: mismatch k3 = "
                f"{metrics['mismatch/k3']:.4g} exceeds max_mismatch = {limit:g}. The engine has other weights, another "
                "chat template or another temperature than the trainer; raise max_mismatch only if that is meant"
            )

    def _learning_rate(self) -> float:
        warmup = self.config.optimizer.warmup_steps
        return self.config.learning_rate * min(1.0, (self.version + 1) / (warmup + 1))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights as the engine computes with them, under the checkpoint's names; a tied matrix appears once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self.dtype)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights."""
        return {"optimizer": self.optimizer.state_dict(), "torch_rng": torch.get_rng_state(), "version": self.version}

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.version = state["version"]
