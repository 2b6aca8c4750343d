"""From samples with advantages to the micro-batches of one optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from bridge.protocol import Sample

LossKind = Literal["dapo", "grpo", "dr_grpo"]


@dataclass(frozen=True)
class MicroBatch:
    """R rows of L tokens for one forward and backward pass, and the T trained tokens among them.

    Padded rows end in padding, where causal attention never looks, so they need no mask. A packed micro-batch is one
    row of S sequences, kept apart by their positions and boundaries.

    Args:
        ids_RL: token ids, int64.
        positions_RL: position of each token in its sequence, int64; None where rows are single sequences.
        boundaries_S: first token of each packed sequence and the end of the last, int32 [S + 1]; None where padded.
        longest: length of the longest sequence.
        index_T: flat position in `ids_RL` whose logits speak of trained token t (the position before it), int64.
        targets_T: the trained tokens, int64.
        behaviour_T: the engine's logprob of each, float32.
        advantages_T: the advantage of its episode, float32.
        weights_T: its share in the loss, float32.
        temperature_T: the temperature it was sampled at, float32.
    """

    ids_RL: torch.Tensor
    positions_RL: torch.Tensor | None
    boundaries_S: torch.Tensor | None
    longest: int
    index_T: torch.Tensor
    targets_T: torch.Tensor
    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    temperature_T: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of it by name, as it travels to another rank."""
        named = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return named | {"longest": torch.tensor(self.longest)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "MicroBatch":
        absent = {"positions_RL": None, "boundaries_S": None}
        return cls(**{**absent, **tensors, "longest": int(tensors["longest"])})  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device) -> "MicroBatch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


@dataclass(frozen=True)
class Batch:
    """All micro-batches of one optimizer step.

    Args:
        micro_batches: in any order; the gradient does not depend on the split. Their number is a multiple of the ranks
            that they were made for.
        trained_tokens: N, the trained tokens in all of them.
        total_tokens: prompt and response tokens, padding not counted.
        dropped_tokens: sampled tokens left out because their behaviour logprob is missing or not finite.
    """

    micro_batches: list[MicroBatch]
    trained_tokens: int
    total_tokens: int
    dropped_tokens: int

    def shares(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of each rank's micro-batches, named `0.ids_RL` and so on; every rank gets as many."""
        return [
            {
                f"{number}.{name}": tensor
                for number, micro in enumerate(self.micro_batches[rank::ranks])
                for name, tensor in micro.tensors().items()
            }
            for rank in range(ranks)
        ]


def micro_batches_from(share: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """One rank's micro-batches from `Batch.shares`."""
    by_number: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in share.items():
        number, _, field = name.partition(".")
        by_number.setdefault(int(number), {})[field] = tensor
    return [MicroBatch.from_tensors(by_number[number]) for number in sorted(by_number)]


def make_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    tokens_per_micro_batch: int,
    *,
    kind: LossKind = "dapo",
    horizon: int = 1,
    packed: bool = False,
    fill: bool = False,
    ranks: int = 1,
) -> Batch:
    """Sort samples by length and cut them into micro-batches of at most `tokens_per_micro_batch` tokens; a longer
    sample gets one of its own.

    Args:
        kind: the normalization. `dapo`: every token 1/N (arXiv 2503.14476, eq. 8); `grpo`: the mean over sequences of
            their token means (arXiv 2402.03300, eq. 3); `dr_grpo`: every token 1/(S * horizon) (arXiv 2503.20783).
        horizon: Dr. GRPO's constant, the longest completion that sampling allows.
        packed: sequences one after the other in one row, instead of padded rows.
        fill: packed rows are padded to the full length, so that a compiled model meets one shape.
        ranks: among which the micro-batches are dealt out; where they are too few, some have no tokens to train.

    Raises:
        ValueError: no sampled token has a finite logprob, so there is nothing to train on.
    """
    if len(samples) != len(advantages):
        raise ValueError(f"{len(samples)} samples but {len(advantages)} advantages")
    lengths = [len(sample.ids) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: -lengths[i])
    bins = (
        _balanced(order, lengths, tokens_per_micro_batch, ranks)
        if packed
        else _rows(order, lengths, tokens_per_micro_batch)
    )
    trained_masks = [_trained(sample) for sample in samples]
    counts = [int(mask.sum()) for mask in trained_masks]
    sampled, trained = sum(sample.response_length for sample in samples), sum(counts)
    if not trained:
        raise ValueError(f"none of {sampled} sampled tokens has a finite logprob: nothing to train on")
    sequences = sum(count > 0 for count in counts)
    weights = {
        "dapo": [1 / trained] * len(samples),
        "grpo": [1 / (sequences * max(count, 1)) for count in counts],
        "dr_grpo": [1 / (sequences * horizon)] * len(samples),
    }[kind]
    shape = None
    if fill:
        longest = -(-max(lengths) // _LENGTH_STEP) * _LENGTH_STEP
        shape = _Shape(tokens_per_micro_batch, longest, 1 << (len(samples) + 8).bit_length())
    micro_batches = []
    for members in bins:
        parts = [(samples[i], trained_masks[i], advantages[i], weights[i]) for i in members]
        micro_batches.append(_packed(parts, shape) if packed else _padded(parts))
    while len(micro_batches) % ranks:
        micro_batches.append(_untrained(micro_batches[-1]))
    return Batch(micro_batches, trained, sum(lengths), sampled - trained)


_LENGTH_STEP = 1024

_Part = tuple[Sample, np.ndarray, float, float]


@dataclass(frozen=True)
class _Shape:
    """What all packed micro-batches of a run look like to a compiled model: tokens, longest sequence, sequences."""

    tokens: int
    longest: int
    sequences: int


def _trained(sample: Sample) -> np.ndarray:
    """Where tokens count in the loss, bool [T]; a first token has nothing before it that could speak of it."""
    mask = sample.sampled & np.isfinite(sample.logprobs)
    mask[:1] = False
    return mask


def _rows(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Sorted by falling length, the first sample of a micro-batch sets its width."""
    bins: list[list[int]] = []
    for i in order:
        if bins and lengths[bins[-1][0]] * (len(bins[-1]) + 1) <= limit:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


def _balanced(order: Sequence[int], lengths: Sequence[int], limit: int, ranks: int) -> list[list[int]]:
    """As few bins as hold everything when the longest go first, each into the emptiest bin: evenly filled, and as many
    on each rank."""
    count = -(-max(1, -(-sum(lengths) // limit)) // ranks) * ranks
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for i in order:
            emptiest = filled.index(min(filled))
            bins[emptiest].append(i)
            filled[emptiest] += lengths[i]
        if all(total <= limit or len(members) == 1 for total, members in zip(filled, bins, strict=True)):
            return [members for members in bins if members]
        count += ranks


def _untrained(micro: MicroBatch) -> MicroBatch:
    """The same work without a trained token, for a rank that would stand aside while others wait for it."""
    per_token = ("index_T", "targets_T", "behaviour_T", "advantages_T", "weights_T", "temperature_T")
    return replace(micro, **{name: getattr(micro, name)[:0] for name in per_token})


def _padded(parts: Sequence[_Part]) -> MicroBatch:
    longest = max(len(sample.ids) for sample, *_ in parts)
    ids_RL = np.zeros((len(parts), longest), np.int64)
    starts = [row * longest for row in range(len(parts))]
    for row, (sample, *_) in enumerate(parts):
        ids_RL[row, : len(sample.ids)] = sample.ids
    return _micro_batch(ids_RL, None, None, longest, parts, starts)


def _packed(parts: Sequence[_Part], shape: _Shape | None) -> MicroBatch:
    pieces = [len(sample.ids) for sample, *_ in parts]
    starts = np.cumsum([0, *pieces[:-1]]).tolist()
    total, longest = sum(pieces), max(pieces)
    padding = max(0, shape.tokens - total) if shape else 0
    if shape:
        longest = max(longest, shape.longest)
        whole, rest = divmod(padding, longest)
        pieces += [longest] * whole + [rest]
        pieces += [0] * (shape.sequences - len(pieces))
    ids_RL = np.zeros((1, total + padding), np.int64)
    ids_RL[0, :total] = np.concatenate([sample.ids for sample, *_ in parts])
    positions_RL = np.concatenate([np.arange(piece) for piece in pieces])[None]
    boundaries_S = np.cumsum([0, *pieces]).astype(np.int32)
    return _micro_batch(ids_RL, positions_RL, boundaries_S, longest, parts, starts)


def _micro_batch(
    ids_RL: np.ndarray,
    positions_RL: np.ndarray | None,
    boundaries_S: np.ndarray | None,
    longest: int,
    parts: Sequence[_Part],
    starts: Sequence[int],
) -> MicroBatch:
    columns: list[list[np.ndarray]] = [[], [], [], [], [], []]
    for (sample, mask, advantage, weight), start in zip(parts, starts, strict=True):
        tokens = np.flatnonzero(mask)
        ones = np.ones(len(tokens), np.float32)
        columns[0].append(start + tokens - 1)
        columns[1].append(sample.ids[tokens].astype(np.int64))
        columns[2].append(sample.logprobs[tokens])
        columns[3].append(ones * np.float32(advantage))
        columns[4].append(ones * np.float32(weight))
        columns[5].append(ones * np.float32(sample.temperature))
    return MicroBatch(
        torch.from_numpy(ids_RL),
        None if positions_RL is None else torch.from_numpy(positions_RL),
        None if boundaries_S is None else torch.from_numpy(boundaries_S),
        longest,
        *(torch.from_numpy(np.concatenate(column)) for column in columns),
    )
