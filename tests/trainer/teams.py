"""Learners on several ranks: rank 0 is the test's own process, the others are started as a run starts them."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from trainer.cli import make_learner
from trainer.config import GrpoConfig
from trainer.learner import Learner
from trainer.runfolder import toml_data
from trainer.team import start_ranks


@contextlib.contextmanager
def team_learner(folder: Path, model: Path, data: int, tensor: int, **settings: Any) -> Iterator[Learner]:
    """A learner of `data x tensor` gloo ranks; all have ended with the block."""
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    config = GrpoConfig(**{"dtype": "float32", "threads": 1, "model": str(model), **settings, "parallelism": sizes})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(toml_data(config.model_dump(mode="json"))))

    async def begin() -> Any:
        return await start_ranks(config.parallelism, ["@", str(folder / "config.toml")], folder)

    with asyncio.Runner() as runner:
        meeting, ranks = runner.run(begin())
        try:
            learner = make_learner(config, str(model), meeting)
            yield learner
            learner.leave()
            for rank in ranks:
                assert runner.run(asyncio.wait_for(rank.process.wait(), 30)) == 0, rank.tail()
        finally:
            for rank in ranks:
                runner.run(rank.stop(0.1))
