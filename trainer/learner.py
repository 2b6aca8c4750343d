"""The learning side of a run: model, optimizer, and one update from one batch."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.batch import Batch, make_batch
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.lora import add_adapters, merged_state_dict
from trainer.loss import policy_loss
from trainer.masters import Masters
from trainer.memory import check_memory, estimate
from trainer.model import DTYPES, Policy, load_model
from trainer.optimizer import learning_rate, make_optimizer
from trainer.selection import Selection


class Learner:
    """Holds the weights and the optimizer; `version` counts the updates behind them.

    Optimizer and updates work on float32 weights whatever `dtype` computes in: a step of 1e-6 would round to nothing in
    bfloat16.
    """

    def __init__(self, config: GrpoConfig, model_path: str | Path, reference_path: str | Path | None = None) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES[config.dtype]
        self.packed = on_gpu if config.packing is None else config.packing
        self.compiled = on_gpu if config.compile is None else config.compile
        dummy = config.load_format == "dummy"
        self.model = load_model(model_path, self.device, dummy=dummy)
        if on_gpu:
            count = sum(parameter.numel() for parameter in self.model.parameters())
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            check_memory(estimate(self.model.config, count, config), free, config)
        if config.lora.rank:
            add_adapters(self.model, config.lora)
        self.masters = Masters(self.model, self.dtype)
        self.policy = Policy(self.model)
        self.policy.prepare(config.memory, self.compiled)
        self.reference: Policy | None = None
        if config.loss.kl_coef:
            reference = load_model(reference_path or model_path, self.device, self.dtype)
            self.reference = Policy(reference.requires_grad_(False))
        self.optimizer = make_optimizer(self.masters.trained(), config.optimizer, config.learning_rate)
        self.version = 0

    def batch(self, selection: Selection) -> Batch | None:
        """The micro-batches of a selection; None where nothing of it can be trained."""
        if not any(bool((sample.sampled[1:]).any()) for sample in selection.samples):
            return None
        return make_batch(
            selection.samples,
            selection.advantages,
            self.config.tokens_per_micro_batch,
            kind=self.config.loss.kind,
            horizon=self.config.sampling.max_tokens,
            packed=self.packed,
            fill=self.packed and self.compiled,
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer update; the metrics of the loss, times in seconds.

        Raises:
            UserError: before the update, engine and trainer disagree on the same weights beyond `max_mismatch`, or the
                gradient is not finite.
        """
        start = time.monotonic()
        self.masters.zero_grad()
        metrics = self._forward_backward(batch)
        forward_backward = time.monotonic() - start
        self._check(metrics)
        lr = learning_rate(self.config.optimizer, self.config.learning_rate, self.version + 1, self.config.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.masters.trained(), self.config.optimizer.max_grad_norm))
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise UserError(f"the gradient of update {self.version + 1} is not finite; lower learning_rate")
        self.optimizer.step()
        self.masters.copy_back()
        self._synchronize()
        self.version += 1
        return metrics | {
            "grad_norm": grad_norm,
            "lr": lr,
            "time/forward_backward": forward_backward,
            "time/optimizer": time.monotonic() - start - forward_backward,
        }

    def skip(self) -> dict[str, float]:
        """A step without anything to learn from: the same weights under the next version."""
        self.version += 1
        return {"update/skipped": 1.0, "time/forward_backward": 0.0, "time/optimizer": 0.0}

    def _forward_backward(self, batch: Batch) -> dict[str, float]:
        """Gradients into the float32 weights; numbers stay on the device until the end."""
        sums: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {}
        loss = torch.zeros((), device=self.device)
        for micro in batch.micro_batches:
            micro = micro.to(self.device)
            logprobs_T, entropy_T = self.policy(micro)
            reference_T = None
            if self.reference:
                with torch.no_grad():
                    reference_T, _ = self.reference(micro)
            terms = policy_loss(
                logprobs_T, micro.behaviour_T, micro.advantages_T, micro.weights_T, self.config.loss, reference_T
            )
            terms.loss.backward()
            loss += terms.loss.detach()
            for name, value in (terms.sums | {"entropy": entropy_T.sum()}).items():
                sums[name] = sums.get(name, 0) + value
            for name, value in terms.maxima.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        names = [*sums, *maxima]
        values = torch.stack([value.double() for value in (*sums.values(), *maxima.values())]).tolist()
        metrics = dict(zip(names, values, strict=True))
        return {"loss": float(loss)} | {
            name: value / batch.trained_tokens if name in sums else value for name, value in metrics.items()
        }

    def _check(self, metrics: dict[str, float]) -> None:
        limit = self.config.max_mismatch
        if not metrics["mismatch/k3"] <= limit:
            raise UserError(
                f"engine and trainer disagree about the weights of policy version {self.version}: mismatch k3 = "
                f"{metrics['mismatch/k3']:.4g} exceeds max_mismatch = {limit:g}. The engine has other weights, another "
                "chat template or another temperature than the trainer; raise max_mismatch only if that is meant"
            )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights as the engine computes with them, under the checkpoint's names; a tied matrix appears once. They stay
        where they are from one update to the next."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face format, the trained weights in float32 and adapters merged."""
        state = merged_state_dict(self.model) if self.config.lora.rank else self.masters.state_dict()
        self.model.save_pretrained(folder, state_dict={name: tensor.contiguous() for name, tensor in state.items()})

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the model that it began with or exported."""
        adapters = [master.detach() for master in self.masters.trained()] if self.config.lora.rank else []
        return {
            "optimizer": self.optimizer.state_dict(),
            "adapters": adapters,
            "torch_rng": torch.get_rng_state(),
            "version": self.version,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["adapters"]:
            with torch.no_grad():
                for master, saved in zip(self.masters.trained(), state["adapters"], strict=True):
                    master.copy_(saved)
            self.masters.copy_back()
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.version = state["version"]
