"""How much of a GPU a run will take, counted before it starts."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.head import CHUNK

GIB = 2**30
# Tensors of hidden and of intermediate width that a decoder layer of the Qwen3 and Llama kind keeps for backward,
# fitted to a compiled Qwen3-4B shape (28 GB for 8,192 tokens).
_HIDDEN_TENSORS, _INTERMEDIATE_TENSORS = 8.0, 2.75


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose, for one rank."""

    weights: float
    optimizer: float
    gradients: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(self).items()) + " GiB"


def estimate(model_config: Any, parameters: int, config: GrpoConfig, ranks: int = 1) -> MemoryEstimate:
    """What training takes at its peak: float32 masters with a computation copy, two AdamW moments, float32 gradients,
    activations of one micro-batch, two chunks of the head's logits.

    Args:
        model_config: the transformers configuration.
        parameters: trainable and frozen together.
        ranks: that share weights, optimizer states and gradients.
    """
    size = 2 if config.dtype == "bfloat16" else 4
    copies = 4 / ranks + (size if size == 2 else 0)
    moments = 2 if config.optimizer.kind == "adamw_8bit" else 8
    layers, hidden = model_config.num_hidden_layers, model_config.hidden_size
    inner = getattr(model_config, "intermediate_size", 4 * hidden)
    kept = {"none": 1.0, "selective": 0.5, "full": 0.0}[config.memory.recompute]
    one_layer = size * (_HIDDEN_TENSORS * hidden + _INTERMEDIATE_TENSORS * inner)
    activations = config.tokens_per_micro_batch * (layers * (kept * one_layer + (1 - kept) * size * hidden) + one_layer)
    return MemoryEstimate(
        weights=parameters * copies,
        optimizer=parameters * moments / ranks,
        gradients=parameters * 4 / ranks,
        activations=activations,
        head=2 * CHUNK * model_config.vocab_size * 4,
    )


def check_fits(model: PreTrainedModel, config: GrpoConfig, device: torch.device) -> None:
    """Refuse a model that this GPU cannot train; on a CPU there is no telling.

    Raises:
        UserError: see `check_memory`.
    """
    if device.type == "cuda":
        count = sum(parameter.numel() for parameter in model.parameters())
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        check_memory(estimate(model.config, count, config, config.parallelism.ranks), free, config)


def check_memory(need: MemoryEstimate, free_bytes: float, config: GrpoConfig) -> None:
    """Refuse a run that cannot fit.

    Raises:
        UserError: it needs more than `free_bytes`; the message counts what goes where and names settings that help.
    """
    if need.total <= free_bytes:
        return
    ways = []
    if config.memory.recompute == "none":
        ways.append("--memory.recompute selective (or full)")
    if config.tokens_per_micro_batch > 4096:
        ways.append(f"--tokens-per-micro-batch {config.tokens_per_micro_batch // 2}")
    if config.optimizer.kind == "adamw":
        ways.append("--optimizer.kind adamw_8bit")
    if not config.lora.rank:
        ways.append("--lora.rank 16")
    raise UserError(
        f"training needs about {need.total / GIB:.0f} GiB ({need}), but {free_bytes / GIB:.0f} GiB are free on the "
        f"GPU; what helps: {', '.join(ways) or 'a smaller model'}"
    )
