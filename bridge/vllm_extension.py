"""Runs inside vLLM's worker process: verifies published weights tensor by tensor, then loads them in place.

vLLM imports this module through `--worker-extension-cls`; nothing else does. Weights come as one safetensors file in
shared memory whose metadata holds the CRC-32 of every tensor.
"""

import zlib
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

    _Base = WorkerBase
else:
    _Base = object


def checksum(tensor: torch.Tensor) -> str:
    """CRC-32 of the tensor's bytes, as 8 hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{zlib.crc32(data.data):08x}"


class WeightExtension(_Base):
    """Methods that `/collective_rpc` can call on every vLLM worker."""

    if TYPE_CHECKING:
        model_runner: Any

        def reload_weights(self, *args: Any, **kwargs: Any) -> None: ...

    def bridge_load_weights(self, path: str) -> dict[str, Any]:
        """Load the safetensors file at `path` into the running model.

        Returns:
            `{"loaded": number of tensors}`, or `{"tensor": name, "error": why}` for the first tensor that is not what
            its sender says it is; the model is then untouched.
        """
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
        if problem := self._compare_with_first(tensors):
            return problem
        self.reload_weights(weights_iterator=iter(tensors.items()))
        self._refresh_cpu_head()
        return {"loaded": len(tensors)}

    def _compare_with_first(self, tensors: dict[str, torch.Tensor]) -> dict[str, str] | None:
        """Every update must bring the tensors of the checkpoint that the engine started from, in their shapes."""
        if not hasattr(self, "_bridge_shapes"):
            from vllm.model_executor.model_loader import get_model_loader

            vllm_config = self.vllm_config
            loader: Any = get_model_loader(vllm_config.load_config)
            model = self.model_runner.get_model()
            weights = loader.get_all_weights(vllm_config.model_config, model)
            tied = getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False)
            # Some published checkpoints carry a second copy of a tied head; the model never reads it.
            self._bridge_shapes = {
                name: tuple(weight.shape) for name, weight in weights if not (tied and name == "lm_head.weight")
            }
        for name in sorted(self._bridge_shapes.keys() | tensors.keys()):
            if name not in tensors:
                return {"tensor": name, "error": "the update lacks it, the checkpoint has it"}
            if name not in self._bridge_shapes:
                return {"tensor": name, "error": "the checkpoint has no such tensor"}
            if tuple(tensors[name].shape) != self._bridge_shapes[name]:
                shape = tuple(tensors[name].shape)
                return {"tensor": name, "error": f"shape {shape} where the model has {self._bridge_shapes[name]}"}
        return None

    def _refresh_cpu_head(self) -> None:
        """Repack the embedding's matrix product: the CPU build leaves a tied `lm_head` at the old weights, silently."""
        if torch.accelerator.is_available():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
