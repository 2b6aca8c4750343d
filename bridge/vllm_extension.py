"""Runs inside vLLM's worker processes: checks published weights tensor by tensor, then puts them into the live model.

vLLM imports this module through `--worker-extension-cls`; nothing else does. An update has two phases, so that it
happens in all workers or in none: `bridge_stage_*` makes the tensors available and checks each against what its sender
said, while the old weights go on serving; `bridge_commit` loads them.
"""

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.transfer import checksum, receive_broadcast, sums, tensors_from_handles

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

    _Base = WorkerBase
else:
    _Base = object


class WeightExtension(_Base):
    """Methods that `/collective_rpc` can call on every vLLM worker. Each answers with a dictionary; where that has an
    `error`, it names the `tensor` as well, and the model is untouched."""

    if TYPE_CHECKING:
        model_runner: Any
        rank: int

        def reload_weights(self, *args: Any, **kwargs: Any) -> None: ...

    _staged: dict[str, torch.Tensor]

    def bridge_stage_file(self, path: str) -> dict[str, Any]:
        """Read the safetensors file at `path`, whose metadata holds the CRC-32 of every tensor."""
        with safe_open(path, framework="pt") as file:
            expected: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        for name in sorted(expected.keys() | tensors.keys()):
            if name not in tensors:
                return {"tensor": name, "error": "it was announced but did not arrive"}
            if name not in expected:
                return {"tensor": name, "error": "it arrived without a checksum"}
            if checksum(tensors[name]) != expected[name]:
                return {"tensor": name, "error": "its bytes differ from what the trainer sent"}
        return self._stage(tensors)

    def bridge_stage_ipc(self, handles: list[dict[str, Any]] | None, expected: dict[str, int]) -> dict[str, Any]:
        """Map the trainer's tensors on this GPU; later updates reuse the mapping and send no handles.

        Args:
            handles: as `bridge.transfer.handles_of` makes them.
            expected: sum of each tensor's bits, see `bridge.transfer.sums`.
        """
        if handles is not None:
            self._mapped = tensors_from_handles(handles)
            self._plan = None
        return self._stage_sums(self._mapped, expected)

    def bridge_stage_broadcast(
        self, address: str, world: int, rank: int, backend: str, layout: list[Any], expected: dict[str, int] | None
    ) -> dict[str, Any]:
        """Receive every tensor from rank 0 of a group of `world` processes at `address` (host:port).

        Args:
            rank: of this server's first worker in the group; the others follow.
            layout: (name, dtype, shape) of each tensor, in the order of their sending.
            expected: as in `bridge_stage_ipc`; None where the sums follow with the commit.
        """
        tensors = receive_broadcast(address, world, rank + self.rank, backend, layout)
        return self._stage_sums(tensors, expected or {})

    def bridge_commit(self) -> dict[str, Any]:
        """Load what was staged into the running model."""
        tensors, self._staged = self._staged, {}
        if not torch.accelerator.is_available():
            self.reload_weights(weights_iterator=iter(tensors.items()))
            self._refresh_cpu_head()
        else:
            self._copy(tensors)
            torch.accelerator.synchronize()
        return {"loaded": len(tensors)}

    def bridge_discard(self) -> dict[str, Any]:
        """Forget what was staged."""
        self._staged = {}
        return {}

    def _stage_sums(self, tensors: dict[str, torch.Tensor], expected: dict[str, int]) -> dict[str, Any]:
        found = sums(tensors)
        for name in sorted(expected.keys() | found.keys()):
            if name not in found:
                return {"tensor": name, "error": "it was announced but did not arrive"}
            if found[name] != expected.get(name):
                return {"tensor": name, "error": "its bytes differ from what the trainer sent"}
        return self._stage(tensors)

    def _stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        if problem := self._compare_with_first(tensors):
            return problem
        self._staged = tensors
        return {"staged": len(tensors)}

    def _compare_with_first(self, tensors: dict[str, torch.Tensor]) -> dict[str, str] | None:
        """Every update must bring the tensors of the checkpoint that the engine started from, in their shapes."""
        if not hasattr(self, "_bridge_shapes"):
            self._bridge_shapes = self._checkpoint_shapes()
        shapes = self._bridge_shapes
        if shapes is None:
            return None
        for name in sorted(shapes.keys() | tensors.keys()):
            if name not in tensors:
                return {"tensor": name, "error": "the update lacks it, the checkpoint has it"}
            if name not in shapes:
                return {"tensor": name, "error": "the checkpoint has no such tensor"}
            if tuple(tensors[name].shape) != shapes[name]:
                shape = tuple(tensors[name].shape)
                return {"tensor": name, "error": f"shape {shape} where the model has {shapes[name]}"}
        return None

    def _checkpoint_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes by name in the checkpoint; None where the engine made its weights up (`load_format = dummy`)."""
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return None
        weights = loader.get_all_weights(self.vllm_config.model_config, self.model_runner.get_model())
        tied = getattr(self.vllm_config.model_config.hf_config, "tie_word_embeddings", False)
        # Some published checkpoints carry a second copy of a tied head; the model never reads it.
        return {name: tuple(weight.shape) for name, weight in weights if not (tied and name == "lm_head.weight")}

    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        """Into the model's own parameters. vLLM's loader splits and joins tensors one by one on the host; where the
        same memory is the source each time, its copies are noted once and repeated in one call from then on."""
        plan = getattr(self, "_plan", None)
        if plan is not None and tensors is getattr(self, "_mapped", None):
            torch._foreach_copy_(*plan)  # pyright: ignore[reportPrivateImportUsage]
            return
        model = self.model_runner.get_model()
        with torch.no_grad(), _CopiesNoted() as noted:
            model.load_weights(iter(tensors.items()))
        self._plan = noted.plan() if noted.covers(model) else None

    def _refresh_cpu_head(self) -> None:
        """Repack the embedding's matrix product: the CPU build leaves a tied `lm_head` at the old weights, silently."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class _CopiesNoted(TorchDispatchMode):
    """Notes the copies between tensors of one device that happen inside."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device == args[1].device:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def covers(self, model: torch.nn.Module) -> bool:
        """Whether the copies wrote every parameter, each element once."""
        parameters = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
        written: dict[int, int] = {}
        for target, source in self.copies:
            if target.dtype != source.dtype or target.shape != source.shape:
                return False
            address = target.untyped_storage().data_ptr()
            written[address] = written.get(address, 0) + target.numel()
        return written == {address: parameter.numel() for address, parameter in parameters.items()}

    def plan(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [target.detach() for target, _ in self.copies], [source.detach() for _, source in self.copies]
