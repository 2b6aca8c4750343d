"""The gate between requests and weight updates: which policy version is served, and who is on the way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from bridge.protocol import BridgeError
from bridge.waiting import waiting_for

Mode = Literal["wait", "keep", "abort"]


class Interrupted(Exception):
    """An attempt was ended from this side, so that it starts again; the message says why."""


@dataclass(eq=False)
class Flight:
    """One attempt at a request inside an engine.

    Args:
        replica: number of the replica that works on it.
        version: policy version that was served when it went in.
        sent: bytes of its answer have reached the client, so it cannot start again.
    """

    replica: int
    version: int
    sent: bool = False
    _scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    _reason: str = ""

    def interrupt(self, reason: str) -> None:
        """End the attempt, unless its client has seen a part of the answer."""
        if not self.sent and not self._reason:
            self._reason = reason
            self._scope.reschedule(asyncio.get_running_loop().time())


class VersionGate:
    """Requests pass while a policy version is served. An update closes the gate, lets those inside finish (`wait`),
    freeze (`keep`) or start again (`abort`), and opens it at the next version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.flights: set[Flight] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._drained = asyncio.Event()
        self._drained.set()
        self.paused = False
        self._updating = False

    @contextlib.asynccontextmanager
    async def request(self, replica: int) -> AsyncIterator[Flight]:
        """Enter as a request, waiting while an update runs.

        Raises:
            Interrupted: see `Flight.interrupt`.
        """
        while not self._open.is_set():
            await self._open.wait()
        flight = Flight(replica, self.version)
        self.flights.add(flight)
        self._drained.clear()
        try:
            async with flight._scope:
                yield flight
        except TimeoutError:
            if flight._scope.expired():
                raise Interrupted(flight._reason) from None
            raise
        finally:
            self.flights.discard(flight)
            if not self.flights:
                self._drained.set()

    @contextlib.asynccontextmanager
    async def update(self, version: int, mode: Mode, timeout: float) -> AsyncIterator[None]:
        """Hold new requests, deal with those inside, and open at `version` when the body succeeds.

        Raises:
            BridgeError: another update runs, or requests are still inside after `timeout` seconds.
        """
        if self._updating:
            raise BridgeError(f"version {version} was published while another update was under way")
        self._updating = True
        self._open.clear()
        try:
            if mode == "abort":
                for flight in list(self.flights):
                    flight.interrupt(f"overtaken by version {version}")
            if mode != "keep":
                await self._drain(version, timeout)
            yield
            self.version = version
        finally:
            self._updating = False
            if not self.paused:
                self._open.set()

    async def _drain(self, version: int, timeout: float) -> None:
        try:
            await waiting_for(self._drained.wait(), f"requests in flight before version {version}", timeout)
        except TimeoutError as error:
            raise BridgeError(
                f"update to version {version}: {len(self.flights)} requests were still running after {timeout:.0f} s"
            ) from error

    def pause(self) -> None:
        """Hold new requests until `resume`; those inside go on."""
        self.paused = True
        self._open.clear()

    def resume(self) -> None:
        self.paused = False
        if not self._updating:
            self._open.set()
