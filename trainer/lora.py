"""Low-rank adapters through peft: put into the model, and written as peft and vLLM read them."""

from pathlib import Path

import peft
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel

from trainer.config import LoraConfig

ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze the model and put trainable adapters, float32 and without effect at first, beside its linear layers."""
    peft.inject_adapter_in_model(_peft_config(config), model, ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def save_adapter(model: PreTrainedModel, config: LoraConfig, base: str, folder: Path) -> None:
    """Write the adapter alone.

    Args:
        base: the model that it belongs to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    named = {f"base_model.model.{name}": tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}
    save_file(named, folder / "adapter_model.safetensors")
    settings = _peft_config(config)
    settings.base_model_name_or_path = base
    if settings.target_modules == "all-linear":
        modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in state}
        settings.target_modules = modules  # pyright: ignore[reportAttributeAccessIssue]
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


@torch.no_grad()
def merged_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of the same model without adapters, under its own names."""
    from peft.tuners.lora import LoraLayer

    state = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            state[name.replace(".base_layer", "")] = parameter.detach().float()
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            weight = f"{name}.weight"
            delta: torch.Tensor = module.get_delta_weight(ADAPTER)  # pyright: ignore[reportAttributeAccessIssue]
            state[weight] = state[weight] + delta.to(state[weight])
    return state


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    return peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
    )
