"""Checkpoints: Hugging Face format plus trainer state, visible only when complete."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from trainer.errors import UserError
from trainer.learner import Learner

_STATE = "trainer_state.pt"


def save_checkpoint(
    folder: Path, step: int, learner: Learner, tokenizer_path: str | Path, progress: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_000050`: it appears by one rename, after which only the `keep` newest stay.

    Args:
        progress: JSON data of the loop (data position, best values) that a resumed run needs.
    """
    final = folder / f"step_{step:06d}"
    partial = folder / f".step_{step:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    learner.export(partial)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(partial)
    torch.save(learner.state(), partial / _STATE)
    (partial / "progress.json").write_text(json.dumps({"step": step, **progress}))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / "progress.json").is_file())


def load_progress(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "progress.json").read_text())


def load_learner_state(checkpoint: Path, learner: Learner) -> None:
    """Put optimizer, random state and version of `checkpoint` into a learner that loaded its weights.

    Raises:
        UserError: the file is damaged or belongs to another model.
    """
    try:
        learner.load_state(torch.load(checkpoint / _STATE, weights_only=True))
    except (RuntimeError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be resumed from: {error}") from error
