"""Child processes that never outlive their parent: own process group, death signal, graceful end, log tail."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends, whatever ends it (Linux only; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def port_in_use(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Should another program take it first, starting the server fails."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def output_of(command: Sequence[str]) -> str:
    """What a short command prints; empty where it cannot run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


class Child:
    """A supervised subprocess in a process group of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name, self.process, self.log = name, process, log

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None
    ) -> "Child":
        """Start `command`; its output goes to `log`, or to this process's standard error where there is none."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log is not None else contextlib.nullcontext(sys.stderr) as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(name, process, log)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log, for an error message."""
        if self.log is None or not self.log.exists():
            return "(its output went to standard error)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def failure(self) -> str:
        where = f"; last lines of {self.log}:\n{self.tail()}" if self.log else ""
        return f"{self.name} ended with exit code {self.process.returncode}{where}"

    async def stop(self, grace: float = 4.0) -> None:
        """SIGTERM to the process, then SIGKILL to whatever is left of its group after `grace` seconds."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
