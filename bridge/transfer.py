"""How weights travel from the trainer to the engines' workers: a file in shared memory, CUDA IPC, or a broadcast.

Only this module and `bridge.vllm_extension` need torch. Nothing here is pickled: handles and layouts are plain data.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_BUCKET_BYTES = 256 * 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> str:
    """CRC-32 of the tensor's bytes, as 8 hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{zlib.crc32(data.data):08x}"


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Each tensor's bits added up as integers: as fast as memory on a GPU, where a CRC is not."""
    if not tensors:
        return {}
    parts = [t.detach().view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64) for t in tensors.values()]
    return dict(zip(tensors, torch.stack(parts).tolist(), strict=True))


def write_file(tensors: Mapping[str, torch.Tensor], path: Path) -> int:
    """Write named tensors with their checksums to `path`; returns the bytes written."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, path, metadata={name: checksum(tensor) for name, tensor in on_cpu.items()})
    return path.stat().st_size


def handles_of(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """CUDA IPC handles of tensors that stay where they are, for another process on the same machine.

    Raises:
        ValueError: a tensor is not on a GPU.
    """
    handles = []
    for name, tensor in tensors.items():
        if not tensor.is_cuda:
            raise ValueError(f"tensor {name!r} is not on a GPU, so it has no CUDA IPC handle")
        parts = tensor.untyped_storage()._share_cuda_()
        handles.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.storage_offset(),
                "storage": [base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in parts],
                "bytes": [isinstance(p, bytes) for p in parts],
            }
        )
    return handles


def tensors_from_handles(handles: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors behind `handles_of`, in this process."""
    tensors = {}
    for handle in handles:
        parts = [
            base64.b64decode(p) if binary else p for p, binary in zip(handle["storage"], handle["bytes"], strict=True)
        ]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        empty = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=storage.device)
        tensors[handle["name"]] = empty.set_(storage, handle["offset"], handle["shape"], handle["stride"])
    return tensors


def layout_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each tensor, in order."""
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]


def send_broadcast(address: str, world: int, backend: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """As rank 0 of `world` processes, send the tensors to all others; returns when they have them."""
    group = _group(address, world, 0, backend)
    try:
        for names in _buckets([(name, t.numel() * t.element_size()) for name, t in tensors.items()]):
            flat = torch.cat([tensors[name].detach().contiguous().flatten().view(torch.uint8) for name in names])
            group.broadcast([flat], _options()).wait()
        group.barrier().wait()
        if backend == "nccl":
            torch.cuda.synchronize()
    finally:
        _close(group)


def receive_broadcast(
    address: str, world: int, rank: int, backend: str, layout: Sequence[Sequence[Any]]
) -> dict[str, torch.Tensor]:
    """The tensors that `send_broadcast` sends, on this process's device."""
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    group = _group(address, world, rank, backend)
    by_name = {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in layout}
    sizes = [(name, torch.Size(shape).numel() * dtype.itemsize) for name, (dtype, shape) in by_name.items()]
    tensors = {}
    try:
        for names in _buckets(sizes):
            bytes_of = dict(sizes)
            flat = torch.empty(sum(bytes_of[name] for name in names), dtype=torch.uint8, device=device)
            group.broadcast([flat], _options()).wait()
            for name, part in zip(names, flat.split([bytes_of[name] for name in names]), strict=True):
                dtype, shape = by_name[name]
                tensors[name] = part.clone().view(dtype).view(shape)
        group.barrier().wait()
        if backend == "nccl":
            torch.cuda.synchronize()
    finally:
        _close(group)
    return tensors


def _buckets(sizes: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Neighbouring tensors together, up to a size: few large messages."""
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(name)
        room -= size
    return buckets


def _group(address: str, world: int, rank: int, backend: str) -> Any:
    """A process group of its own, beside whatever groups the process has."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroupGloo
    from torch.distributed.distributed_c10d import PrefixStore

    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=120)
    store = PrefixStore("bridge", TCPStore(host, int(port), world, is_master=rank == 0, timeout=timeout))
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        return ProcessGroupNCCL(store, rank, world, ProcessGroupNCCL.Options())
    return ProcessGroupGloo(store, rank, world, timeout)


def _options() -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _close(group: Any) -> None:
    if hasattr(group, "shutdown"):
        group.shutdown()
