"""The learner's state on disk through torch.distributed.checkpoint: written in the background, read by any number of
ranks."""

import warnings
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from trainer.errors import UserError
from trainer.team import Team

State = dict[str, torch.Tensor]

# One rank is a choice here, not an accident.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class StateWriter:
    """Writes one state at a time. Every rank of the team has one, and all write together."""

    def __init__(self, team: Team | None) -> None:
        self._team = team
        self._writing: Future[object] | None = None

    def write(self, folder: Path, state: State) -> None:
        """Copy `state` and write the copy meanwhile.

        Raises:
            OSError, RuntimeError: the one before could not be written.
        """
        self.wait()
        writer = FileSystemWriter(folder, single_file_per_rank=True)
        group = self._team.storage if self._team else None
        writing = async_save(state, storage_writer=writer, process_group=group)
        assert isinstance(writing, Future)
        self._writing = writing

    def wait(self) -> None:
        """Until the last one is on disk.

        Raises:
            OSError, RuntimeError: it could not be written.
        """
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()


def read_state(folder: Path, state: State, team: Team | None) -> None:
    """Read into the tensors of `state`, each rank its own parts.

    A random state that is not there is left as it is: more ranks read than wrote.

    Raises:
        UserError: the folder is damaged or belongs to another model.
    """
    reader = FileSystemReader(folder)
    group = team.storage if team else None
    try:
        there: Metadata = reader.read_metadata()
        wanted = {name: t for name, t in state.items() if name in there.state_dict_metadata or name[:4] != "rng/"}
        load(wanted, storage_reader=reader, process_group=group)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, CheckpointException) as error:
        raise UserError(f"checkpoint {folder.parent} cannot be resumed from: {error}") from error
