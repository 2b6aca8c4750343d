"""The learning side of a run: model, optimizer, and one update from one batch, on one rank or on a team of them."""

import contextlib
import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from trainer.batch import Batch, MicroBatch, make_batch, micro_batches_from
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.loss import policy_loss
from trainer.masters import Masters
from trainer.memory import check_fits
from trainer.model import DTYPES, Policy, load_model
from trainer.optimizer import learning_rate, make_optimizer
from trainer.selection import Selection
from trainer.state import StateWriter, read_state
from trainer.team import Team, device_of


class Learner:
    """Holds the weights and the optimizer; `version` counts the updates behind them.

    Optimizer and updates work on float32 weights whatever `dtype` computes in: a step of 1e-6 would round to nothing in
    bfloat16.

    Args:
        model_path: folder or hub id of the weights to begin with.
        reference_path: those of the KL term's reference, where they differ.
        team: the ranks that share the work. Rank 0's methods make the others, inside `follow`, do their part.
        local: which of this machine's GPUs is this rank's.
    """

    def __init__(
        self,
        config: GrpoConfig,
        model_path: str | Path,
        reference_path: str | Path | None = None,
        team: Team | None = None,
        local: int = 0,
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config, self.team = config, team
        self.device = device_of(local)
        on_gpu = self.device.type == "cuda"
        self.dtype = DTYPES[config.dtype]
        self.packed = on_gpu if config.packing is None else config.packing
        self.compiled = on_gpu if config.compile is None else config.compile
        self.policy = self._load(model_path)
        self.model: PreTrainedModel = self.policy.model
        # On a team each rank's shards are float32 and are updated in place.
        self.masters = Masters(self.model, torch.float32 if team else self.dtype)
        self.reference: Policy | None = None
        if config.loss.kl_coef:
            self.reference = self._load_reference(reference_path or model_path)
        self.optimizer = make_optimizer(self.masters.trained(), config.optimizer, config.learning_rate)
        self.version = 0
        self._gathered: dict[str, torch.Tensor] = {}
        self._writer = StateWriter(team)

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
            ranks=self.team.shares if self.team else 1,
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer update; the metrics of the loss, times in seconds.

        Raises:
            UserError: before the update, engine and trainer disagree on the same weights beyond `max_mismatch`, or the
                gradient is not finite.
        """
        micro_batches = batch.micro_batches
        if self.team:
            shares = batch.shares(self.team.shares)
            call = self.team.call("step", {"trained_tokens": batch.trained_tokens}, shares)
            micro_batches = micro_batches_from(call.tensors)
        return self._step(micro_batches, batch.trained_tokens)

    def skip(self) -> dict[str, float]:
        """A step without anything to learn from: the same weights under the next version."""
        if self.team:
            self.team.call("skip")
        self.version += 1
        return {"update/skipped": 1.0, "time/forward_backward": 0.0, "time/optimizer": 0.0}

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights as the engine computes with them, under the checkpoint's names; a tied matrix appears once. They stay
        where they are from one update to the next."""
        if not self.team:
            return {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.team.call("gather")
        self._gather()
        return self._gathered

    def export(self) -> dict[str, torch.Tensor]:
        """The whole model in its computation type, adapters merged, on the CPU; nothing later changes it."""
        if self.config.lora.rank:
            from trainer.lora import merged_state_dict

            state = merged_state_dict(self.model)
        else:
            state = self.weights()
        return {name: tensor.to("cpu", self.dtype, copy=True).contiguous() for name, tensor in state.items()}

    def write_state(self, folder: Path) -> None:
        """Begin to write what a resumed run needs: trained weights, optimizer, random state of every rank, version. It
        returns as soon as training may go on; `state_written` waits for the rest."""
        if self.team:
            self.team.call("write_state", {"folder": str(folder)})
        self._writer.write(folder, self._state())

    def state_written(self) -> None:
        """Wait until the last `write_state` is on disk.

        Raises:
            OSError, RuntimeError: it is not.
        """
        self._writer.wait()

    def load_state(self, folder: Path) -> None:
        """Continue from what `write_state` wrote, on as many ranks or on another number.

        Raises:
            UserError: the folder is damaged or belongs to another model.
        """
        if self.team:
            self.team.call("load_state", {"folder": str(folder)})
        self._load_state(folder)

    def follow(self) -> None:
        """On the ranks other than 0: take part in what rank 0 does, until it leaves."""
        assert self.team is not None
        while (call := self.team.receive()).method != "leave":
            if call.method == "step":
                with contextlib.suppress(UserError):  # rank 0 found the same, says it, and may still save
                    self._step(micro_batches_from(call.tensors), call.arguments["trained_tokens"])
            elif call.method == "skip":
                self.version += 1
            elif call.method == "gather":
                self._gather()
            elif call.method == "write_state":
                self._writer.write(Path(call.arguments["folder"]), self._state())
            elif call.method == "load_state":
                self._load_state(Path(call.arguments["folder"]))
        self._writer.wait()
        self.team.leave()

    def leave(self) -> None:
        """End the team; on rank 0 alone, as the last thing."""
        self._writer.wait()
        if self.team:
            self.team.call("leave")
            self.team.leave()

    def _load(self, path: str | Path) -> Policy:
        config = self.config
        if self.team:
            from trainer.parallel import parallel_policy

            return parallel_policy(path, self.team, self.device, config, self.dtype, self.compiled)
        kept = torch.promote_types(self.dtype, torch.float32)
        model = load_model(path, self.device, kept, dummy=config.load_format == "dummy")
        check_fits(model, config, self.device)
        if config.lora.rank:
            from trainer.lora import add_adapters  # peft alone takes seconds to import

            add_adapters(model, config.lora)
        policy = Policy(model)
        policy.prepare(config.memory, self.compiled)
        return policy

    def _load_reference(self, path: str | Path) -> Policy:
        if self.team:
            from trainer.parallel import parallel_policy

            policy = parallel_policy(path, self.team, self.device, self.config, self.dtype, False)
        else:
            policy = Policy(load_model(path, self.device, self.dtype))
        policy.requires_grad_(False)
        return policy

    def _step(self, micro_batches: list[MicroBatch], trained_tokens: int) -> dict[str, float]:
        start = time.monotonic()
        self.masters.zero_grad()
        metrics = self._forward_backward(micro_batches, trained_tokens)
        forward_backward = time.monotonic() - start
        self._check(metrics)
        lr = learning_rate(self.config.optimizer, self.config.learning_rate, self.version + 1, self.config.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self.masters.trained(), self.config.optimizer.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
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

    def _forward_backward(self, micro_batches: list[MicroBatch], trained_tokens: int) -> dict[str, float]:
        """Gradients into the float32 weights; numbers stay on the device until the end."""
        sums: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {}
        for micro in micro_batches:
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
            entropy = entropy_T.sum() / trained_tokens
            shares = {name: value / trained_tokens for name, value in terms.sums.items()}
            for name, value in ({"loss": terms.loss.detach(), "entropy": entropy} | shares).items():
                sums[name] = sums.get(name, 0) + value.double()
            for name, value in terms.maxima.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        summed = torch.stack(list(sums.values()))
        highest = torch.stack([value.double() for value in maxima.values()])
        if self.team:
            group = self.team.mesh["data"].get_group()
            dist.all_reduce(summed, group=group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        return dict(zip([*sums, *maxima], torch.cat([summed, highest]).tolist(), strict=True))

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

    @torch.no_grad()
    def _gather(self) -> None:
        """Whole weights from everybody's shards, kept by rank 0 at addresses that stay."""
        assert self.team is not None
        for name, parameter in self.model.named_parameters():
            part = cast(DTensor, parameter.detach().to(self.dtype))
            # Over `data` first: what is left is then evenly cut, one plain collective each.
            whole = part.redistribute(placements=[Replicate(), *part.placements[1:]]).full_tensor()
            if self.team.rank == 0:
                if name in self._gathered:
                    self._gathered[name].copy_(whole)
                else:
                    self._gathered[name] = whole.clone()

    def _state(self) -> dict[str, torch.Tensor]:
        """Flat, so that any number of ranks can read what another wrote; the tensors are the learner's own."""
        state: dict[str, torch.Tensor] = {"version": torch.tensor(self.version)}
        state[f"rng/{self.team.rank if self.team else 0}"] = torch.get_rng_state()
        for name, master in zip(self.masters.names, self.masters.trained(), strict=True):
            state[f"weights/{name}"] = master.detach()
            for key, value in self.optimizer.state[master].items():
                state[f"optimizer/{name}/{key}"] = value
        return state

    def _load_state(self, folder: Path) -> None:
        self._make_moments()
        state = self._state()
        read_state(folder, state, self.team)
        self.masters.copy_back()
        torch.set_rng_state(state[f"rng/{self.team.rank if self.team else 0}"])
        self.version = int(state["version"])

    def _make_moments(self) -> None:
        """Give the optimizer its states, by a step that changes nothing: what was saved is read into them."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for master in self.masters.trained():
            master.grad = torch.zeros_like(master)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
