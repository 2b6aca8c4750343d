"""Attention over packed sequences on a GPU, as a transformers attention function named `varlen`."""

import inspect
from functools import cache
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "varlen"


@cache
def register() -> str:
    """Make `attn_implementation = "varlen"` known; gives the name.

    It reads `cu_seq_lens_q` (first token of each sequence and the end, int32 [S + 1]) and `max_length_q` from the
    model's keyword arguments, as transformers' own flash-attention functions do.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        *,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (states.transpose(1, 2)[0] for states in (query, key, value))
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, **causal)
        assert isinstance(out, torch.Tensor)
        return out.unsqueeze(0), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
    return NAME
