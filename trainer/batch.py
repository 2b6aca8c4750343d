"""From samples with advantages to the micro-batches of one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bridge.protocol import Sample


@dataclass(frozen=True)
class MicroBatch:
    """R rows of L tokens for one forward and backward pass; position t of every per-token array speaks of token t + 1.

    Rows are padded on the right, where causal attention never looks, so no attention mask is needed.

    Args:
        ids_RL: token ids, int64.
        trained_RL: True where token t + 1 was sampled and counts in the loss.
        targets_RL: token t + 1, int64; 0 at the last position.
        behaviour_RL: the engine's logprob of token t + 1, float32.
        advantages_RL: the advantage of the row's episode, float32.
        temperature_R: the row's sampling temperature, float32 [R].
    """

    ids_RL: torch.Tensor
    trained_RL: torch.Tensor
    targets_RL: torch.Tensor
    behaviour_RL: torch.Tensor
    advantages_RL: torch.Tensor
    temperature_R: torch.Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Batch:
    """All micro-batches of one optimizer step.

    Args:
        micro_batches: in any order; the gradient does not depend on the split.
        trained_tokens: N, the number of True entries of `trained_RL` in all of them.
        total_tokens: prompt and response tokens, padding not counted.
        dropped_tokens: sampled tokens left out because their behaviour logprob is missing or not finite.
    """

    micro_batches: list[MicroBatch]
    trained_tokens: int
    total_tokens: int
    dropped_tokens: int


def make_batch(samples: Sequence[Sample], advantages: Sequence[float], tokens_per_micro_batch: int) -> Batch:
    """Sort samples by length and cut them into padded micro-batches of at most `tokens_per_micro_batch` tokens.

    Raises:
        ValueError: no sampled token has a finite logprob, so there is nothing to train on.
    """
    if len(samples) != len(advantages):
        raise ValueError(f"{len(samples)} samples but {len(advantages)} advantages")
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i].ids))
    rows: list[list[int]] = []
    for i in order:
        # Sorted by falling length: the first sample of a micro-batch sets its width.
        if rows and len(samples[rows[-1][0]].ids) * (len(rows[-1]) + 1) <= tokens_per_micro_batch:
            rows[-1].append(i)
        else:
            rows.append([i])
    sampled = sum(sample.response_length for sample in samples)
    trained = sum(int((sample.sampled & np.isfinite(sample.logprobs)).sum()) for sample in samples)
    if not trained:
        raise ValueError(f"none of {sampled} sampled tokens has a finite logprob: nothing to train on")
    return Batch(
        micro_batches=[_collate([samples[i] for i in row], [advantages[i] for i in row]) for row in rows],
        trained_tokens=trained,
        total_tokens=sum(len(sample.ids) for sample in samples),
        dropped_tokens=sampled - trained,
    )


def _collate(samples: Sequence[Sample], advantages: Sequence[float]) -> MicroBatch:
    shape = len(samples), max(len(sample.ids) for sample in samples)
    ids, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    trained, behaviour = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        finite = np.isfinite(sample.logprobs)
        ids[row, :length] = sample.ids
        targets[row, : length - 1] = sample.ids[1:]
        trained[row, : length - 1] = (sample.sampled & finite)[1:]
        behaviour[row, : length - 1] = np.where(finite, sample.logprobs, 0.0)[1:]
    advantages_R = torch.tensor(advantages, dtype=torch.float32)
    return MicroBatch(
        ids_RL=torch.from_numpy(ids),
        trained_RL=torch.from_numpy(trained),
        targets_RL=torch.from_numpy(targets),
        behaviour_RL=torch.from_numpy(behaviour),
        advantages_RL=advantages_R[:, None].expand(shape),
        temperature_R=torch.tensor([sample.temperature for sample in samples], dtype=torch.float32),
    )
