"""The policy as a transformers model: loading it, and its logprobs of given tokens under a temperature."""

from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainer.batch import MicroBatch
from trainer.config import MemoryConfig
from trainer.errors import UserError
from trainer.head import VocabularyPart, head_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

transformers_logging.disable_progress_bar()


def load_model(
    path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32, dummy: bool = False
) -> PreTrainedModel:
    """Load a causal language model for training, its weights in `dtype`; a `dummy` has random ones of its shape.

    Raises:
        UserError: the folder does not exist or holds no model that transformers can load.
    """
    attention = attention_for(device)
    try:
        if dummy:
            with device:
                config = AutoConfig.from_pretrained(path)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError) as error:
        raise UserError(f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    torch.nn.Module.to(model, device)
    return model.train()


def attention_for(device: torch.device) -> str:
    """Name of the attention that knows the boundaries of packed sequences on this device."""
    if device.type != "cuda":
        return "sdpa"
    from trainer.attention import register

    return register()


class Policy(torch.nn.Module):
    """The model and its head as one forward pass. The layers compute in the parameters' type; the head's sums and the
    softmax are float32 at least.

    Args:
        vocabulary: ranks that each hold a part of the head's rows (`trainer.parallel`).
    """

    def __init__(self, model: PreTrainedModel, vocabulary: DeviceMesh | None = None) -> None:
        super().__init__()
        self.model, self.vocabulary = model, vocabulary

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob (with gradient) and entropy (without) of every trained token, [T]."""
        packed: dict[str, Any] = {}
        if micro.positions_RL is not None:
            packed["position_ids"] = micro.positions_RL
            if micro.ids_RL.is_cuda:
                packed |= {"cu_seq_lens_q": micro.boundaries_S, "cu_seq_lens_k": micro.boundaries_S}
                packed |= {"max_length_q": micro.longest, "max_length_k": micro.longest}
        head = self.model.get_output_embeddings() or self.model.get_input_embeddings()
        head_VD, part = cast(torch.Tensor, head.weight), None
        if self.vocabulary is not None:
            head_VD = cast(DTensor, head_VD).to_local()
            part = VocabularyPart(self.vocabulary.get_group(), self.vocabulary.get_local_rank() * len(head_VD))
        hidden_RLD = self.model.get_decoder()(input_ids=micro.ids_RL, use_cache=False, **packed).last_hidden_state
        hidden_TD = hidden_RLD.flatten(0, 1)[micro.index_T]
        return head_logprobs(hidden_TD, head_VD, micro.targets_T, micro.temperature_T, part)

    def prepare(self, memory: MemoryConfig, compile_layers: bool) -> None:
        """Recompute activations where that is chosen, and compile the decoder's layers one by one."""
        layers: Any = self.model.get_decoder().layers
        if memory.recompute != "none":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for number, layer in enumerate(layers):
                layer.gradient_checkpointing = memory.recompute == "full" or number % 2 == 0
        if compile_layers:
            for layer in layers:
                layer.compile(dynamic=False)
