"""The environment side of a run: its configuration, its tasks, and the Verifiers server process that runs episodes."""

import asyncio
import contextlib
import importlib.metadata
import logging
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tomli
from pydantic import BaseModel, ValidationError
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.configs.serve import ServeConfig, pool_serve_kwargs
from verifiers.v1.serve import EnvClient, serve_env
from verifiers.v1.serve.pool import env_config_data
from verifiers.v1.task import Task
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config, taskset_config_type

from bridge.config import did_you_mean
from trainer.errors import UserError

_ORPHAN_SECONDS = 5.0


class EnvironmentFile(BaseModel):
    """`verifiers_env.toml`, resolved: what runs (`env`) and how it is served (`serve`)."""

    env: Any
    serve: ServeConfig


def installed_environments() -> list[str]:
    """Ids of the installed packages that depend on Verifiers, as environment packages do."""
    names = set()
    for distribution in importlib.metadata.distributions():
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0].lower() == "verifiers":  # type: ignore[index]
                names.add(distribution.name)
    return sorted(names - {"vf-grpo", "prime-rl"})


def read_environment(path: Path, env: str, taskset: dict[str, Any]) -> EnvironmentFile:
    """Read `path`, put `env` and the `taskset` settings on top, and resolve it with the taskset's own config class.

    Raises:
        UserError: no such file, broken TOML, an environment that is not installed, or a setting that does not exist.
    """
    path = _find(path)
    try:
        data = tomli.loads(path.read_text())
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    env_data = data.get("env", {})
    env_data["taskset"] = {**env_data.get("taskset", {}), **_nested(taskset), "id": env}
    try:
        return EnvironmentFile(env=resolve_env_config(env_data), serve=ServeConfig(**data.get("serve", {})))
    except ModuleNotFoundError as error:
        known = ", ".join(installed_environments()) or "none"
        raise UserError(
            f"environment {env!r} is not installed (installed: {known}). Install it with `pip install {env}`, "
            f"`pip install -e environments/{env.replace('-', '_')}`, or `prime env install OWNER/{env}`"
        ) from error
    except ValidationError as error:
        raise UserError(f"environment {env!r}: {_explain(error, env)}") from error


def load_tasks(env: EnvConfig) -> list[Task]:
    """All tasks of the taskset, in its own order.

    Raises:
        UserError: the data cannot be read (the message names the row), or there is none.
    """
    try:
        tasks = list(load_taskset(env.taskset))
    except (ValueError, OSError) as error:
        raise UserError(f"taskset {env.taskset.id!r} cannot be loaded: {error}") from error
    if not tasks:
        raise UserError(f"taskset {env.taskset.id!r} holds no task with these settings: {env.taskset}")
    return tasks


class EnvironmentServer:
    """The Verifiers environment server as a child process, and the client to it."""

    def __init__(self, process: Any, death_pipe: Any, client: EnvClient) -> None:
        self.process, self.client = process, client
        self._death_pipe = death_pipe

    @classmethod
    async def start(cls, environment: EnvironmentFile, log: Path, timeout: float = 120.0) -> "EnvironmentServer":
        """Start the server and wait until it answers.

        Raises:
            UserError: it ended or did not answer within `timeout` seconds; its log's name is given.
        """
        context = multiprocessing.get_context("spawn")
        addresses: Any = context.Queue()
        ours, theirs = context.Pipe()
        kwargs = {
            **pool_serve_kwargs(environment.serve.pool),
            "address": environment.serve.address or "tcp://127.0.0.1:0",
            "address_queue": addresses,
            "death_pipe": theirs,
            "log_setup": partial(_set_up_server, log),
            "config_data": env_config_data(environment.env),
            "max_concurrent": environment.serve.max_concurrent,
        }
        process = context.Process(target=serve_env, kwargs=kwargs, name="environment server")
        with _ignoring_sigint():
            process.start()
        theirs.close()
        client: EnvClient | None = None
        try:
            async with asyncio.timeout(timeout):
                client = EnvClient(await _address(addresses, process, log))
                await client.wait_for_server_startup(timeout, interval=0.5)
        except BaseException as error:
            await _end(process, ours, client, grace=0.0)
            if isinstance(error, TimeoutError):
                raise UserError(f"the environment server did not answer within {timeout:.0f} s; see {log}") from error
            raise
        return cls(process, ours, client)

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    async def stop(self, grace: float = 2.0) -> None:
        await _end(self.process, self._death_pipe, self.client, grace)


async def _address(addresses: Any, process: Any, log: Path) -> str:
    """The address that the started server reports."""
    while True:
        try:
            return addresses.get_nowait()
        except queue.Empty:
            if not process.is_alive():
                raise UserError(f"the environment server did not start; see {log}") from None
            await asyncio.sleep(0.05)


async def _end(process: Any, death_pipe: Any, client: EnvClient | None, grace: float) -> None:
    """End the server process: with `grace` seconds for its own clean-up, and its whole group in the end."""
    if client:
        await client.close()
    death_pipe.close()
    if grace:
        process.terminate()
        await asyncio.to_thread(process.join, grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    await asyncio.to_thread(process.join)


def _find(path: Path) -> Path:
    """`path` as given, else the file of that name that comes with the package."""
    for folder in (Path(), Path(__file__).parents[1], Path(__file__).parent):
        if (folder / path).is_file():
            return folder / path
    raise UserError(f"env_config file {str(path)!r} does not exist")


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"arithmetic.high": 9}` as `{"arithmetic": {"high": 9}}`."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = {**target.get(leaf, {}), **value} if isinstance(value, dict) else value
    return result


def _explain(error: ValidationError, env: str) -> str:
    """Each fault with its path; an unknown taskset key with the nearest known one."""
    parts = []
    for fault in error.errors():
        path = ".".join(map(str, fault["loc"]))
        text = f"{path}: {fault['msg']} (got {fault.get('input')!r})"
        if fault["type"] == "extra_forbidden" and fault["loc"][:-1] == ("taskset",):
            known = taskset_config_type(env).model_fields
            text = f"there is no setting {path}; {did_you_mean(str(fault['loc'][-1]), known)}"
        parts.append(text)
    return "; ".join(parts)


def _set_up_server(path: Path) -> None:
    """Runs in the server process: everything it says goes to its log file, Ctrl-C is its parent's business, and it ends
    with it."""
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    library = logging.getLogger("verifiers.v1")
    library.setLevel(logging.WARNING)


def _end_with(parent: int) -> None:
    """Verifiers' own teardown waits for episodes that may never end; a server without a parent ends all the same."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_ORPHAN_SECONDS)
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _ignoring_sigint() -> Iterator[None]:
    """Start a child that ignores Ctrl-C until it is in a session of its own."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
