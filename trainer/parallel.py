"""A policy split over the ranks of a team: tensor parallel by the model's own plan, then FSDP2.

No rank ever holds the whole model: it is laid out on the meta device, cut, and each rank reads its part of the
safetensors files. Sharded parameters are float32 (the masters that the optimizer updates); layers compute in the run's
type, and gradients are summed in float32.
"""

import re
import zlib
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.memory import check_fits
from trainer.model import Policy, attention_for
from trainer.team import Team

# Rules of transformers' plans that a dense model needs; anything else there is refused by name.
_COLWISE, _ROWWISE, _WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


def parallel_policy(
    path: str | Path, team: Team, device: torch.device, config: GrpoConfig, dtype: torch.dtype, compiled: bool
) -> Policy:
    """The model in `path` as this rank's part of one policy.

    Args:
        dtype: what layers compute in; parameters are float32 (float64 where this is).

    Raises:
        UserError: the model cannot be loaded, or not be split over so many ranks.
    """
    kept = torch.promote_types(dtype, torch.float32)
    try:
        shape = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, dtype=kept, attn_implementation=attention_for(device))
    except (OSError, ValueError) as error:
        raise UserError(f"model {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.train()
    if shape.tie_word_embeddings:
        model.set_output_embeddings(cast(Any, None))  # the embedding is the head
    policy = Policy(model)
    if team.mesh["tensor"].size() > 1:
        _split_tensors(policy, team.mesh["tensor"])
    policy.prepare(config.memory, compiled)
    check_fits(model, config, device)
    _shard(policy, team.mesh["data"], dtype, kept)
    policy.to_empty(device=device)
    for module in model.modules():
        if list(module.buffers(recurse=False)):
            model._init_weights(module)  # rotary frequencies, which no file holds
    if config.load_format == "dummy":
        _make_up_weights(model, config.seed)
    else:
        _read_shards(model, path)
    return policy


def _split_tensors(policy: Policy, mesh: DeviceMesh) -> None:
    """Cut the matrices of every layer by the model's `base_model_tp_plan`, embedding and head by vocabulary."""
    model, size = policy.model, mesh.size()
    shape = model.config
    decoder = model.get_decoder()
    plan = {name: style for name, style in (shape.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    if not plan:
        raise UserError(f"{type(model).__name__} has no tensor-parallel plan; set parallelism.tensor_parallel_size = 1")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = getattr(shape, name, size)
        if count % size:
            raise UserError(f"parallelism.tensor_parallel_size = {size} does not divide the model's {name} = {count}")
    styles: dict[str, ParallelStyle] = {}
    for name, module in decoder.named_modules():
        rule = plan.get(re.sub(r"\.\d+", ".*", name))
        if rule == _COLWISE:
            styles[name] = ColwiseParallel()
        elif rule == _ROWWISE:
            styles[name] = RowwiseParallel()
        elif rule not in (None, _WHOLE):
            raise UserError(
                f"the tensor-parallel plan of {type(model).__name__} says {rule!r} of {name}, which is not supported; "
                "set parallelism.tensor_parallel_size = 1"
            )
        elif list(module.parameters(recurse=False)) and module is not model.get_input_embeddings():
            styles[name] = _Whole(heads=rule == _WHOLE)
    parallelize_module(decoder, mesh, styles)
    parallelize_module(decoder, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if (head := model.get_output_embeddings()) is not None:
        parallelize_module(head, mesh, ColwiseParallel())
    for name, module in decoder.named_modules():
        inputs = [child for child in module.children() if plan.get(_rule_of(name, child, module)) == _COLWISE]
        if len(inputs) > 1:
            module.register_forward_pre_hook(_SharedInput(mesh), with_kwargs=True)
    policy.vocabulary = mesh


def _rule_of(name: str, child: nn.Module, module: nn.Module) -> str:
    (child_name,) = (key for key, value in module.named_children() if value is child)
    return re.sub(r"\.\d+", ".*", f"{name}.{child_name}")


class _SharedInput:
    """Several split matrices read the same input: its gradient is then summed over the ranks once, not once each."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (DTensor.from_local(args[0], self.mesh, [Replicate()], run_check=False), *args[1:]), kwargs
        hidden = DTensor.from_local(kwargs["hidden_states"], self.mesh, [Replicate()], run_check=False)
        return args, kwargs | {"hidden_states": hidden}


class _Whole(ParallelStyle):
    """A normalization that every rank holds whole.

    Args:
        heads: it works on this rank's own attention heads, [..., head, dim], so that its weights' gradients are sums
            over the ranks; else on what all ranks have alike.
    """

    def __init__(self, heads: bool) -> None:
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.data, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            placement = Shard(args[0].ndim - 2) if self.heads else Replicate()
            return (DTensor.from_local(args[0], device_mesh, [placement], run_check=False), *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype, kept: torch.dtype) -> None:
    """FSDP2 over `mesh`, one unit a layer. Gradients are sums: the loss is normalized over the whole batch."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == kept else dtype, reduce_dtype=kept, cast_forward_inputs=False
    )
    layers = cast(Any, policy.model.get_decoder()).layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=mesh.size() > 1)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _read_shards(model: PreTrainedModel, path: str | Path) -> None:
    """Each rank reads its slices of the safetensors files in `path`, a folder or hub id."""
    found = cached_file(str(path), "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    found = found or cached_file(str(path), "model.safetensors")
    assert found is not None
    state = {name: parameter for name, parameter in model.named_parameters()}
    try:
        load(state, storage_reader=HuggingFaceStorageReader(str(Path(found).parent)))
    except CheckpointException as error:
        raise UserError(f"model {str(path)!r} lacks weights of its own shape: {error}") from error


def _make_up_weights(model: PreTrainedModel, seed: int) -> None:
    """Weights from the seed, the names, and where a shard begins."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            local, start = parameter, (0,)
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                _, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            key = zlib.crc32(f"{seed}/{name}/{tuple(start)}".encode())
            local.normal_(0.0, 0.02, generator=torch.Generator(local.device).manual_seed(key))
