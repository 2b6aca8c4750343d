"""The training command: picks a recipe, builds the parts, runs the loop, ends cleanly and says what happened."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic_config import cli

from bridge.engine import on_gpu
from bridge.processes import Child
from bridge.protocol import BridgeError
from trainer.checkpoint import complete_checkpoints, load_progress
from trainer.config import GrpoConfig
from trainer.console import Display, checking_bar
from trainer.environment import load_tasks, read_environment
from trainer.errors import UserError
from trainer.grpo import GrpoRun, Progress
from trainer.learner import Learner
from trainer.rollouts import VerifiersRollouts
from trainer.runfolder import RunFolder
from trainer.selfcheck import checked_tasks
from trainer.services import Services, start_services
from trainer.team import Meeting, Team, device_of, start_ranks
from trainer.tiny import tiny_model_dir

INTERRUPTED = 130


def main() -> None:
    """Entry point of `python -m trainer.grpo`; exit code 0 after a whole run, 1 after an error, 130 after Ctrl-C."""
    meeting = Meeting.taken_from_environment()
    config = read_config(sys.argv[1:], quiet=bool(meeting and meeting.rank))
    try:
        if meeting and meeting.rank:
            follow(config, meeting)
        else:
            sys.exit(asyncio.run(run_until_done(config, meeting)))
    except (UserError, BridgeError) as error:
        sys.exit(f"error: {error}")


def follow(config: GrpoConfig, meeting: Meeting) -> None:
    """The part of a rank other than 0: it learns what rank 0 tells it to, until rank 0 leaves."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 saves first, and then ends the team
    team = Team.join(meeting, config.parallelism, device_of(meeting.local))
    model = model_path(config.model)
    Learner(config, model, team=team, local=meeting.local).follow()


def read_config(args: list[str], quiet: bool = False) -> GrpoConfig:
    """Parse the command line; without a recipe (`@ FILE`) the one for this machine is taken, and said."""
    if "@" not in args and not {"--help", "-h", "--resume"} & set(args):
        recipe = recipe_for_this_machine()
        if not quiet:
            print(f"recipe {recipe.stem}: {_why(recipe)}. Choose another with `@ {recipe.parent}/NAME.toml`.")
        args = [*args, "@", str(recipe)]
    # Only what it reads from sys.argv itself does pydantic_config answer with a message instead of a traceback.
    sys.argv[1:] = args
    return cli(GrpoConfig, prog="python -m trainer.grpo")  # pyright: ignore[reportCallIssue]


def recipe_folder() -> Path:
    """Recipes of the source tree, or of the installed package."""
    folders = (Path("configs"), Path(__file__).parents[1] / "configs", Path(__file__).parent / "configs")
    return next((folder for folder in folders if (folder / "tiny_cpu.toml").is_file()), folders[0])


def recipe_for_this_machine() -> Path:
    """Without a GPU `tiny_cpu`; else Qwen3-4B on as many GPUs as there are, where such a recipe exists."""
    folder = recipe_folder()
    if on_gpu():
        import torch

        recipe = folder / f"qwen3_4b_{torch.cuda.device_count()}gpu.toml"
        if recipe.is_file():
            return recipe
    return folder / "tiny_cpu.toml"


def _why(recipe: Path) -> str:
    if recipe.stem != "tiny_cpu":
        return "for the GPUs found"
    return "no recipe for these GPUs yet, so the CPU one" if on_gpu() else "no GPU found"


async def run_until_done(config: GrpoConfig, meeting: Meeting | None = None) -> int:
    """A whole run, as rank 0; returns the exit code.

    Args:
        meeting: where the other ranks are met, if a launcher started them.

    Raises:
        UserError, BridgeError: with a message for the user; every child has ended by then.
    """
    loop = asyncio.get_running_loop()
    main_task = asyncio.current_task()
    assert main_task is not None
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            main_task.cancel()
        else:
            os._exit(INTERRUPTED)  # children carry a parent-death signal

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)

    environment = read_environment(config.env_config, config.env, config.taskset)
    validation = read_environment(config.env_config, config.env, {**config.taskset, **config.validation.taskset})
    train_tasks = load_tasks(environment.env)
    held_out = load_tasks(validation.env)[: config.validation.problems] if config.validation.interval else []
    model = model_path(config.model)
    with checking_bar(sys.stderr.isatty()) as bar:
        train_tasks = await checked_tasks(train_tasks, config.env, config.self_check, bar)
        held_out = await checked_tasks(held_out, config.env, config.self_check, bar)
    folder = RunFolder.open(config)
    checkpoint = complete_checkpoints(folder.checkpoints)[-1] if config.resume else None
    progress = Progress(**load_progress(checkpoint)) if checkpoint else Progress()
    started = time.monotonic()
    live = config.progress == "rich" or (config.progress == "auto" and sys.stdout.isatty())
    title = f"GRPO on {config.env} with {Path(config.model).name}"
    with Display(title, config.max_steps, progress.step, live) as display:
        display.status("starting vLLM and the environment server")
        run: GrpoRun | None = None
        async with team_started(config, meeting, folder.logs) as (meeting, ranks):
            try:
                bridge = bridge_config(config, model)
                async with start_services(bridge, environment, folder.logs, ranks) as services:
                    learner = await asyncio.to_thread(make_learner, config, model, meeting)
                    name = "policy" if config.lora.rank else bridge.engine.served_name or ""
                    client = services.environment.client
                    rollouts = VerifiersRollouts(client, services.bridge, name, model, config.sampling)
                    run = GrpoRun(
                        config, folder, learner, rollouts, services, train_tasks, held_out, model, display, progress
                    )
                    if checkpoint:
                        await asyncio.to_thread(run.restore, checkpoint)
                    await supervised(run, services)
                learner.leave()
            except asyncio.CancelledError:
                keep_progress(run, started)
                say_interrupted(display, folder, run)
                return INTERRUPTED
            except (UserError, BridgeError):
                if all(rank.running for rank in ranks) and keep_progress(run, started):
                    say_how_to_resume(display, folder)
                raise
    assert run is not None
    say_done(display, folder, run, run.progress.seconds + time.monotonic() - started)
    return 0


@contextlib.asynccontextmanager
async def team_started(
    config: GrpoConfig, meeting: Meeting | None, logs: Path
) -> AsyncIterator[tuple[Meeting | None, list[Child]]]:
    """The other ranks, where the configuration asks for several and no launcher started them; none is left after."""
    ranks: list[Child] = []
    if meeting is None and config.parallelism.ranks > 1:
        meeting, ranks = await start_ranks(config.parallelism, sys.argv[1:], logs)
    try:
        yield meeting, ranks
    finally:
        await asyncio.gather(*(rank.stop(0.5) for rank in ranks))


def make_learner(config: GrpoConfig, model: str, meeting: Meeting | None) -> Learner:
    """Rank 0's learner, once all ranks are there."""
    if meeting is None:
        return Learner(config, model)
    team = Team.join(meeting, config.parallelism, device_of(meeting.local))
    return Learner(config, model, team=team, local=meeting.local)


async def supervised(run: GrpoRun, services: Services) -> None:
    """Train until done or until a child ends, whichever is first; a dead child is the error that gets reported."""
    work, watch = asyncio.create_task(run.train()), asyncio.create_task(services.watch())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception():
            with contextlib.suppress(TimeoutError):  # a child that just died explains whatever failed better
                await asyncio.wait_for(asyncio.shield(watch), 2.0)
        done = watch if watch.done() else work
        await done
    finally:
        for task in (work, watch):
            task.cancel()
        lost = next((rank for rank in services.ranks if not rank.running), None)
        _, stuck = await asyncio.wait({work, watch}, timeout=10 if lost else None)
        if lost and stuck:  # inside a collective that no signal reaches; the children go with this process
            print(f"error: {lost.failure()}", file=sys.stderr, flush=True)
            os._exit(1)
        await asyncio.gather(work, watch, return_exceptions=True)


def model_path(model: str) -> str:
    """The folder or hub id behind `model`.

    Raises:
        UserError: it looks like a path and is no folder with a `config.json`.
    """
    if model == "tiny":
        return str(tiny_model_dir())
    path = Path(model).expanduser()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model folder {model!r} holds no config.json; name a folder in Hugging Face format")
        return str(path)
    if looks_local:
        raise UserError(f"model {model!r} does not exist; name a folder, a hub id OWNER/NAME, or `tiny`")
    return model


def bridge_config(config: GrpoConfig, model: str):
    """The bridge's settings of this run: the trainer's model and dtype. Engines start from the model that the run began
    with, which stays where it is when checkpoints go; a resumed run then publishes what it has learned.

    Raises:
        UserError: no engine computes in the trainer's type.
    """
    if config.dtype == "float64":
        raise UserError('dtype = "float64" is for checks of the learner alone; choose float32 or bfloat16 for a run')
    engine = config.bridge.engine.model_copy(
        update={
            "model": model,
            "dtype": config.dtype,
            "served_name": config.bridge.engine.served_name or Path(config.model).name,
            "seed": config.seed,
            "lora_rank": config.lora.rank,
            "load_format": config.load_format,
        }
    )
    return config.bridge.model_copy(update={"engine": engine})


def keep_progress(run: GrpoRun | None, started: float) -> bool:
    """Save what an unfinished run has learned; whether there is anything to go on from."""
    if run is None or run.progress.step == 0:
        return False
    run.progress.seconds += time.monotonic() - started
    run.save()
    run.checkpoints.finish()
    run.learner.leave()
    return bool(complete_checkpoints(run.folder.checkpoints))


def say_interrupted(display: Display, folder: RunFolder, run: GrpoRun | None) -> None:
    if run is None or run.saved_step <= 0:
        display.say(f"\nInterrupted before the first step; nothing to resume. Logs: {folder.logs}")
        return
    display.say(f"\nInterrupted after step {run.saved_step}; checkpoint saved.")
    say_how_to_resume(display, folder)


def say_how_to_resume(display: Display, folder: RunFolder) -> None:
    display.say(f"To go on:\n  {tool('python')} -m trainer.grpo @ {folder.path / 'config.toml'} --resume")


def say_done(display: Display, folder: RunFolder, run: GrpoRun, seconds: float) -> None:
    rewards, config = run.progress.rewards, run.config
    kind = "validation" if "validation_first" in rewards else "train"
    before, after = rewards.get(f"{kind}_first"), rewards.get(f"{kind}_last")
    folder.save_summary(
        {"reward_before": before, "reward_after": after, "steps": run.progress.step, "seconds": round(seconds, 1)}
    )
    label = "held-out reward" if kind == "validation" else "training reward"
    if before is not None and after is not None:
        display.say(f"\n{label}: {before:.3f} before, {after:.3f} after {run.progress.step} steps ({seconds:.0f} s)")
    display.say(f"run folder: {folder.path}")
    checkpoints = complete_checkpoints(folder.checkpoints)
    if checkpoints:
        taskset = flags("env.taskset", {**config.taskset, **config.validation.taskset})
        display.say(
            "next: ask the result yourself, through any OpenAI-compatible client, or evaluate it with Verifiers\n"
            f"  {tool('python')} -m bridge serve {checkpoints[-1]} --port 8000\n"
            f"  {tool('vf-eval')} {config.env} -m {checkpoints[-1]} -n 64 -r 1 "
            "--client.base-url http://127.0.0.1:8000/v1 --client.api-key-var NONE "
            f"--sampling.max-tokens {config.sampling.max_tokens} --env.agent.runtime.type subprocess "
            f"{taskset} --no-push --no-rich\n"
            f"or train something else: {tool('python')} -m trainer.grpo --help"
        )


def tool(name: str) -> str:
    """How to call a program of this environment from the current folder."""
    path = Path(sys.executable).with_name(name)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else name


def flags(prefix: str, settings: dict[str, Any]) -> str:
    """Settings as command-line flags; lists are left out, the environments' defaults cover them."""
    parts = []
    for key, value in settings.items():
        name = f"{prefix}.{key.replace('_', '-')}"
        if isinstance(value, dict):
            parts.append(flags(name, value))
        elif not isinstance(value, list):
            parts.append(f"--{name} {value}")
    return " ".join(filter(None, parts))
