"""The language-model head: logprobs and entropies of chosen tokens, whose logits never exist all at once."""

from typing import Any

import torch

CHUNK = 4096


def head_logprobs(
    hidden_TD: torch.Tensor, head_VD: torch.Tensor, targets_T: torch.Tensor, temperature_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(hidden @ head.T / temperature)[target]` and the entropy in nats of the same distributions.

    Logits are computed `CHUNK` tokens at a time, in float32 (float64 for float64 operands), and again in backward. On a
    GPU bfloat16 operands give float32 logits without being copied to float32 first.

    Returns:
        logprobs_T with gradient and entropy_T without, both float32 or float64 [T].
    """
    return _HeadLogprobs.apply(hidden_TD, head_VD, targets_T, temperature_T)  # pyright: ignore[reportReturnType]


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD, head_VD, targets_T, temperature_T = args
        pick = _on_gpu(_pick) if hidden_TD.is_cuda else _pick
        parts = []
        for start in range(0, len(targets_T), CHUNK):
            chunk = slice(start, start + CHUNK)
            logits_CV = _logits(hidden_TD[chunk], head_VD)
            parts.append(pick(logits_CV, targets_T[chunk], temperature_T[chunk]))
        logprobs_T, normalizer_T, entropy_T = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, temperature_T, normalizer_T)
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_T = grads[0]
        hidden_TD, head_VD, targets_T, temperature_T, normalizer_T = ctx.saved_tensors
        slope = _on_gpu(_slope) if hidden_TD.is_cuda else _slope
        kind = torch.promote_types(hidden_TD.dtype, torch.float32)
        d_hidden_TD = torch.empty_like(hidden_TD)
        d_head_VD = torch.zeros(head_VD.shape, dtype=kind, device=head_VD.device)
        for start in range(0, len(targets_T), CHUNK):
            chunk = slice(start, start + CHUNK)
            logits_CV = _logits(hidden_TD[chunk], head_VD)
            d_logits_CV = slope(
                logits_CV, targets_T[chunk], temperature_T[chunk], normalizer_T[chunk], grad_T[chunk].contiguous()
            ).to(hidden_TD.dtype)
            d_hidden_TD[chunk] = d_logits_CV @ head_VD.to(hidden_TD.dtype)
            d_head_VD += _product(d_logits_CV.t(), hidden_TD[chunk])
        return d_hidden_TD, d_head_VD.to(head_VD.dtype), None, None


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
    scaled_CV = logits_CV / temperature_C[:, None]
    normalizer_C = torch.logsumexp(scaled_CV, 1)
    logprobs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0] - normalizer_C
    mean_C = (torch.exp(scaled_CV - normalizer_C[:, None]) * scaled_CV).sum(1)
    return logprobs_C, normalizer_C, normalizer_C - mean_C


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
