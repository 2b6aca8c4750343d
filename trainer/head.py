"""The language-model head: logprobs and entropies of chosen tokens, whose logits never exist all at once."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK = 4096


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the head that this rank holds: from `first` on; the ranks of `group` hold the rest."""

    group: dist.ProcessGroup
    first: int


def head_logprobs(
    hidden_TD: torch.Tensor,
    head_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature_T: torch.Tensor,
    part: VocabularyPart | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(hidden @ head.T / temperature)[target]` and the entropy in nats of the same distributions.

    Logits are computed `CHUNK` tokens at a time, in float32 (float64 for float64 operands), and again in backward. On a
    GPU bfloat16 operands give float32 logits without being copied to float32 first.

    Args:
        part: where the vocabulary is divided over ranks; `head_VD` then holds this rank's rows alone, and what comes
            back, the gradient of `hidden_TD` too, is the same on all of them.

    Returns:
        logprobs_T with gradient and entropy_T without, both float32 or float64 [T].
    """
    return _HeadLogprobs.apply(hidden_TD, head_VD, targets_T, temperature_T, part)  # pyright: ignore[reportReturnType]


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD, head_VD, targets_T, temperature_T, part = args
        pick = _on_gpu(_pick) if hidden_TD.is_cuda else _pick
        parts = []
        for chunk in _chunks(len(targets_T)):
            logits_CV = _logits(hidden_TD[chunk], head_VD)
            here_C = targets_T[chunk] - (part.first if part else 0)
            picked_3C = pick(logits_CV, here_C, temperature_T[chunk])
            parts.append(_combine(picked_3C, part.group) if part else picked_3C)
        chosen_T, normalizer_T, mean_T = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        ctx.part = part
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, temperature_T, normalizer_T)
        entropy_T = normalizer_T - mean_T
        ctx.mark_non_differentiable(entropy_T)
        return chosen_T - normalizer_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        grad_T = grads[0]
        hidden_TD, head_VD, targets_T, temperature_T, normalizer_T = ctx.saved_tensors
        slope = _on_gpu(_slope) if hidden_TD.is_cuda else _slope
        kind = torch.promote_types(hidden_TD.dtype, torch.float32)
        first = ctx.part.first if ctx.part else 0
        d_hidden_TD = torch.empty_like(hidden_TD)
        d_head_VD = torch.zeros(head_VD.shape, dtype=kind, device=head_VD.device)
        for chunk in _chunks(len(targets_T)):
            logits_CV = _logits(hidden_TD[chunk], head_VD)
            d_logits_CV = slope(
                logits_CV,
                targets_T[chunk] - first,
                temperature_T[chunk],
                normalizer_T[chunk],
                grad_T[chunk].contiguous(),
            ).to(hidden_TD.dtype)
            d_hidden_TD[chunk] = d_logits_CV @ head_VD.to(hidden_TD.dtype)
            d_head_VD += _product(d_logits_CV.t(), hidden_TD[chunk])
        if ctx.part:
            dist.all_reduce(d_hidden_TD, group=ctx.part.group)
        return d_hidden_TD, d_head_VD.to(head_VD.dtype), None, None, None


def _chunks(length: int) -> list[slice]:
    """At least one, so that a rank without tokens takes part in what the others do."""
    return [slice(start, start + CHUNK) for start in range(0, max(length, 1), CHUNK)]


def _combine(
    picked_3C: tuple[torch.Tensor, torch.Tensor, torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the parts of the vocabulary to the whole: log-sum-exp of the normalizers, and the mean logit weighted by
    each part's share of the probability."""
    chosen_C, normalizer_C, mean_C = picked_3C
    highest_C = normalizer_C.clone()
    dist.all_reduce(highest_C, dist.ReduceOp.MAX, group)
    mass_C = torch.exp(normalizer_C - highest_C)
    sums_3C = torch.stack([chosen_C, mass_C, mass_C * mean_C])
    dist.all_reduce(sums_3C, group=group)
    return sums_3C[0], highest_C + torch.log(sums_3C[1]), sums_3C[2] / sums_3C[1]


def _logits(hidden_CD: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    return _product(hidden_CD, head_VD.to(hidden_CD.dtype).t())


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A matrix product summed and returned in float32 at least."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    kind = torch.promote_types(left.dtype, torch.float32)
    return left.to(kind) @ right.to(kind)


def _pick(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperature_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's scaled logit (0 where it is outside V), the log-sum-exp, and the mean scaled logit, [C] each."""
    scaled_CV = logits_CV / temperature_C[:, None]
    normalizer_C = torch.logsumexp(scaled_CV, 1)
    inside_C = (targets_C >= 0) & (targets_C < logits_CV.shape[1])
    chosen_C = scaled_CV.gather(1, torch.where(inside_C, targets_C, 0)[:, None])[:, 0]
    mean_C = (torch.exp(scaled_CV - normalizer_C[:, None]) * scaled_CV).sum(1)
    return torch.where(inside_C, chosen_C, 0.0), normalizer_C, mean_C


def _slope(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    temperature_C: torch.Tensor,
    normalizer_C: torch.Tensor,
    grad_C: torch.Tensor,
) -> torch.Tensor:
    """Derivative by the logits of a sum of logprobs weighted with `grad`."""
    probabilities_CV = torch.exp(logits_CV / temperature_C[:, None] - normalizer_C[:, None])
    chosen_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device)[None] == targets_C[:, None]
    return (chosen_CV.to(logits_CV.dtype) - probabilities_CV) * (grad_C / temperature_C)[:, None]


_compiled: dict[Any, Any] = {}


def _on_gpu(function: Any) -> Any:
    """The function as one kernel; the last chunk's length differs each time, hence `dynamic`."""
    if function not in _compiled:
        _compiled[function] = torch.compile(function, dynamic=True)
    return _compiled[function]
