"""Checkpoints: a Hugging Face model and the learner's state, written in the background, visible when whole."""

import contextlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoTokenizer, PreTrainedModel

from trainer.errors import UserError
from trainer.learner import Learner

_STATE = "state"


class Checkpoints:
    """The checkpoints of one run, `folder/step_000050` and so on. One is written at a time.

    Args:
        keep: how many of the newest stay.
        tokenizer: folder or hub id of the tokenizer that goes with the model.
    """

    def __init__(self, folder: Path, keep: int, tokenizer: str | Path) -> None:
        self.folder, self.keep, self.tokenizer = folder, keep, tokenizer
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, step: int, learner: Learner, progress: dict[str, Any]) -> None:
        """Copy the learner's state and write it meanwhile. The checkpoint appears by one rename when all is there.

        Args:
            progress: JSON data of the loop (data position, best values) that a resumed run needs.

        Raises:
            UserError: the checkpoint before could not be written.
        """
        self.finish()
        partial = self.folder / f".step_{step:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        learner.write_state(partial / _STATE)
        weights = learner.export()
        said = json.dumps({"step": step, **progress})
        self._writing = self._background.submit(
            self._complete, step, partial, learner.state_written, learner.model, weights, said
        )

    def finish(self) -> None:
        """Wait until what was begun is on disk.

        Raises:
            UserError: it could not be written; the older checkpoints are untouched.
        """
        writing, self._writing = self._writing, None
        if writing:
            try:
                writing.result()
            except (OSError, RuntimeError) as error:
                raise UserError(f"the checkpoint could not be written to {self.folder}: {error}") from error

    def _complete(
        self,
        step: int,
        partial: Path,
        state_written: Callable[[], None],
        model: PreTrainedModel,
        weights: dict[str, torch.Tensor],
        progress: str,
    ) -> None:
        save_torch_state_dict(weights, partial)
        model.config.save_pretrained(partial)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(self.tokenizer).save_pretrained(partial)
        state_written()
        (partial / "progress.json").write_text(progress)
        final = self.folder / f"step_{step:06d}"
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            shutil.rmtree(old)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / "progress.json").is_file())


def forget_partial(folder: Path) -> None:
    """Remove what a killed run had begun to write."""
    for path in folder.glob(".step_*.partial"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def load_progress(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "progress.json").read_text())


def load_learner_state(checkpoint: Path, learner: Learner) -> None:
    """Put weights, optimizer, random state and version of `checkpoint` into the learner.

    Raises:
        UserError: the files are damaged or belong to another model.
    """
    learner.load_state(checkpoint / _STATE)
