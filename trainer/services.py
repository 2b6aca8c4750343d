"""The processes around the learner: starts bridge and environment server, notices when one ends, ends them all."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from bridge.client import BridgeClient
from bridge.config import BridgeConfig
from bridge.processes import Child
from trainer.environment import EnvironmentFile, EnvironmentServer
from trainer.errors import UserError


@dataclass
class Services:
    """Running children of the controller and the clients to them."""

    bridge_process: Child
    bridge: BridgeClient
    environment: EnvironmentServer
    ranks: Sequence[Child] = ()

    def failure(self) -> str | None:
        """What to tell the user if a child has ended."""
        for process in (self.bridge_process, *self.ranks):
            if not process.running:
                return _why_it_ended(process)
        if not self.environment.running:
            return f"the environment server ended with exit code {self.environment.process.exitcode}"
        return None

    async def watch(self) -> None:
        """Return only by raising.

        Raises:
            UserError: a child ended while the run needed it.
        """
        while True:
            if failure := self.failure():
                raise UserError(failure)
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def start_services(
    bridge: BridgeConfig, environment: EnvironmentFile, logs: Path, ranks: Sequence[Child] = ()
) -> AsyncIterator[Services]:
    """Start both children side by side; on leaving, whatever happened, none is left. Their files go to `logs`.

    Args:
        ranks: the learner's other ranks, running already, to be watched with the rest.
    """
    async with contextlib.AsyncExitStack() as stack:
        settings, ready = logs / "bridge.toml", logs / "bridge.url"
        ready.unlink(missing_ok=True)
        bridge = bridge.model_copy(update={"ready_file": ready, "log_dir": logs})
        settings.write_text(tomli_w.dumps(bridge.model_dump(mode="json", exclude_none=True)))
        command = [sys.executable, "-m", "bridge", "serve", "@", str(settings)]
        process = await Child.start("bridge", command, logs / "bridge.log")
        stack.push_async_callback(process.stop, 7.0)
        server = await EnvironmentServer.start(environment, logs / "environment.log")
        stack.push_async_callback(server.stop)
        url = await _bridge_url(process, ready, bridge.engine.start_timeout)
        client = await stack.enter_async_context(BridgeClient(url))
        yield Services(process, client, server, ranks)


async def _bridge_url(process: Child, ready: Path, timeout: float) -> str:
    deadline = asyncio.get_running_loop().time() + timeout
    while not ready.exists():
        if not process.running:
            raise UserError(_why_it_ended(process))
        if asyncio.get_running_loop().time() > deadline:
            raise UserError(f"the bridge was not ready within {timeout:.0f} s; its log is {process.log}")
        await asyncio.sleep(0.1)
    return ready.read_text()


def _why_it_ended(child: Child) -> str:
    """Its own last words, which name the cause; where it had none, its exit code and the end of its log."""
    _, said, reason = f"\n{child.tail(60)}".rpartition("\nerror: ")
    return reason if said else child.failure()
