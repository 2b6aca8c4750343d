"""The policy as a transformers model: loading it, and its logprobs of given tokens under a temperature."""

from pathlib import Path
from typing import cast

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainer.batch import MicroBatch
from trainer.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_CHUNK = 4096

transformers_logging.disable_progress_bar()


def load_model(path: str | Path, device: torch.device) -> PreTrainedModel:
    """Load a causal language model for training, its weights in float32.

    Raises:
        UserError: the folder does not exist or holds no model that transformers can load.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    torch.nn.Module.to(model, device)
    return model.train()


def token_logprobs(
    model: PreTrainedModel, micro: MicroBatch, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob and entropy of every trained token of a micro-batch, in row order.

    Args:
        dtype: computation type of the layers; the head's products and the softmax are float32 whatever it is.

    Returns:
        logprobs_T: `log_softmax(logits / temperature)[target]`, float32 with gradient, [T].
        entropy_T: entropy in nats of the same distributions, float32 without gradient, [T].
    """
    with torch.autocast(micro.ids_RL.device.type, dtype, enabled=dtype != torch.float32):
        hidden_RLD = model.get_decoder()(input_ids=micro.ids_RL, use_cache=False).last_hidden_state
    hidden_TD = hidden_RLD[micro.trained_RL]
    targets_T = micro.targets_RL[micro.trained_RL]
    temperature_T = micro.temperature_R[:, None].expand_as(micro.trained_RL)[micro.trained_RL]
    # The engine has the head in `dtype`: the trainer sees the same rounding, the gradient goes to the float32 weights.
    head_VD = cast(torch.nn.Linear, model.get_output_embeddings()).weight.to(dtype).float()
    parts = [
        checkpoint(
            _head,
            hidden_TD[i : i + HEAD_CHUNK],
            head_VD,
            targets_T[i : i + HEAD_CHUNK],
            temperature_T[i : i + HEAD_CHUNK],
            use_reentrant=False,
        )
        for i in range(0, len(targets_T), HEAD_CHUNK)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _head(
    hidden_CD: torch.Tensor, head_VD: torch.Tensor, targets_C: torch.Tensor, temperature_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of the language-model head in float32; recomputed in backward so that only one chunk's logits exist."""
    logits_CV = (hidden_CD.float() @ head_VD.t()) / temperature_C[:, None]
    logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
    logprobs_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
    with torch.no_grad():
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    return logprobs_C, entropy_C
