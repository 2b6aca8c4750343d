"""The ranks of one learner: how they find each other, and how rank 0 tells the others what to do next.

Rank 0 runs the loop; the others wait for calls (a method's name, plain data, tensors) and take part in each. Calls
travel as safetensors with JSON metadata, never as pickled objects. A rank is sent the share that it works on, no more.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bridge.processes import Child, free_port
from trainer.config import ParallelismConfig
from trainer.errors import UserError

# Between two calls a rank may wait for rollouts as long as they take.
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True)
class Call:
    """One step that all ranks take together.

    Args:
        method: what to do; `leave` ends the team.
        arguments: JSON data, the same for all ranks.
        tensors: this rank's share, on the CPU.
    """

    method: str
    arguments: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Meeting:
    """Where a process meets the other ranks.

    Args:
        address, port: of the store that rank 0 keeps, or the launcher where it is `hosted`.
        local: number among the ranks of this machine, which picks the GPU.
        world: how many ranks there are.
    """

    address: str
    port: int
    rank: int
    local: int
    world: int
    hosted: bool = False

    @classmethod
    def taken_from_environment(cls) -> "Meeting | None":
        """What torchrun or `start_ranks` said; None where neither started this process. The variables are removed:
        they would mislead the programs that rank 0 starts."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        hosted = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        address, port = os.environ.pop("MASTER_ADDR"), int(os.environ.pop("MASTER_PORT"))
        rank, world = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
        return cls(address, port, rank, int(os.environ.pop("LOCAL_RANK", "0")), world, hosted)


class Team:
    """All ranks as a mesh `data x tensor`: samples are divided over `data`, every matrix over both.

    Args:
        mesh: of the device type that the ranks compute on.
        control, storage: gloo groups of all ranks, whatever the devices: for calls, and for checkpoints that are
            written meanwhile.
    """

    def __init__(self, mesh: DeviceMesh, control: dist.ProcessGroup, storage: dist.ProcessGroup) -> None:
        self.mesh, self.control, self.storage = mesh, control, storage
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def join(cls, meeting: Meeting, config: ParallelismConfig, device: torch.device) -> "Team":
        """Meet the other ranks; returns when all are there.

        Raises:
            UserError: as many ranks were started as the configuration does not ask for.
        """
        if meeting.world != config.ranks:
            raise UserError(
                f"{meeting.world} ranks were started, but parallelism.data_parallel_size x tensor_parallel_size = "
                f"{config.data_parallel_size} x {config.tensor_parallel_size} asks for {config.ranks}"
            )
        hosts = meeting.rank == 0 and not meeting.hosted
        keeper = (meeting.address, meeting.port, meeting.world, hosts)
        store = dist.TCPStore(*keeper, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        store = dist.PrefixStore("vf-grpo", store)  # pyright: ignore[reportPrivateImportUsage]
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.world)
        shape = (config.data_parallel_size, config.tensor_parallel_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        mesh._flatten("all")  # sums over both then take one collective
        control, storage = (dist.new_group(backend="gloo", timeout=_PATIENCE) for _ in range(2))
        assert isinstance(control, dist.ProcessGroup) and isinstance(storage, dist.ProcessGroup)
        return cls(mesh, control, storage)

    @property
    def shares(self) -> int:
        """Into how many shares samples are divided."""
        return self.mesh["data"].size()

    def call(self, method: str, arguments: Any = None, shares: Sequence[Mapping[str, torch.Tensor]] = ()) -> Call:
        """On rank 0: tell the others to do `method` now; gives rank 0's own part of it.

        Args:
            shares: tensors by name for each place along `data`; none where the method needs none.
        """
        arguments = arguments or {}
        metadata = {"call": json.dumps({"method": method, "arguments": arguments})}
        for rank in range(1, self.size):
            tensors = shares[self._place(rank)] if shares else {}
            # An empty file cannot carry metadata in safetensors.
            payload = {name: tensor.contiguous() for name, tensor in tensors.items()} or {"none": torch.zeros(1)}
            message = torch.frombuffer(bytearray(save(payload, metadata)), dtype=torch.uint8)
            dist.send(torch.tensor([len(message)]), rank, self.control)
            dist.send(message, rank, self.control)
        return Call(method, arguments, dict(shares[self._place(0)]) if shares else {})

    def receive(self) -> Call:
        """On the other ranks: wait for the next call."""
        length = torch.zeros(1, dtype=torch.long)
        dist.recv(length, 0, self.control)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(message, 0, self.control)
        data = message.numpy().tobytes()
        header_length = int.from_bytes(data[:8], "little")
        said = json.loads(json.loads(data[8 : 8 + header_length])["__metadata__"]["call"])
        return Call(said["method"], said["arguments"], load(data))

    def leave(self) -> None:
        """End this rank's part."""
        dist.destroy_process_group()

    def _place(self, rank: int) -> int:
        return rank // self.mesh["tensor"].size()


def device_of(local: int) -> torch.device:
    """This rank's device: the GPU of its number on this machine, the current one from now on, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


async def start_ranks(config: ParallelismConfig, arguments: Sequence[str], logs: Path) -> tuple[Meeting, list[Child]]:
    """Start all ranks but this process, which becomes rank 0, on this machine.

    Args:
        arguments: of `python -m trainer.grpo`, the same for all ranks.
        logs: where `trainer_1.log` and so on go.

    Returns:
        Where rank 0 meets them, and the processes.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    if gpus and gpus < config.ranks:
        raise UserError(
            f"parallelism asks for {config.ranks} ranks, one GPU each, but this process sees {gpus}; start it on every "
            "node with torchrun, or lower parallelism.data_parallel_size or tensor_parallel_size"
        )
    address, port = "127.0.0.1", free_port()
    children = []
    for rank in range(1, config.ranks):
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(config.ranks)}
        place |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "trainer.grpo", *arguments]
        children.append(await Child.start(f"trainer rank {rank}", command, logs / f"trainer_{rank}.log", place))
    return Meeting(address, port, 0, 0, config.ranks), children
