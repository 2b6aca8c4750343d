"""The replicas: which one takes a request, how many wait, and what happens to one that dies."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from bridge.config import BridgeConfig
from bridge.engine import Engine
from bridge.gate import VersionGate
from bridge.protocol import BridgeError
from bridge.waiting import waiting_for

logger = logging.getLogger("bridge")

State = Literal["starting", "serving", "stale", "failed"]
_RESTART_WINDOW = 600.0
_REMEMBERED_SESSIONS = 65_536
_BACKOFF = (0.0, 1.0, 2.0, 5.0, 10.0)


class Overloaded(Exception):
    """The queue is full (429), or no replica is left to wait for (503)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Stale(Exception):
    """The current weights cannot be given to a replica before they are published again."""


@dataclass(eq=False)
class Replica:
    """One place for a vLLM server; `engine` is the server in it, if one runs.

    Args:
        url: of a server that runs elsewhere; empty for one that is started here.
        state: `stale` runs, with weights of another version, until the next are published.
    """

    number: int
    url: str = ""
    gpus: list[int] | None = None
    engine: Engine | None = None
    state: State = "starting"
    in_flight: int = 0
    restarts: deque[float] = field(default_factory=deque)
    evicted: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    @property
    def name(self) -> str:
        return f"replica {self.number}" + (f" ({self.url})" if self.url else "")


class Pool:
    """All replicas. Requests take the least loaded one, a session the one that knows it.

    Args:
        give_weights: puts the current weights into a server that just started; raises `Stale` where it cannot.
    """

    def __init__(
        self,
        config: BridgeConfig,
        session: aiohttp.ClientSession,
        gate: VersionGate,
        give_weights: Callable[[Engine, bool], Awaitable[None]],
    ) -> None:
        self.config, self.session, self.gate, self.give_weights = config, session, gate, give_weights
        size = config.engine.tensor_parallel_size
        self.replicas = [
            Replica(number, gpus=config.gpus[number * size : (number + 1) * size] if config.gpus else None)
            for number in range(config.replicas)
        ]
        if not config.gpus and config.replicas > 1:
            for replica in self.replicas:
                replica.gpus = list(range(replica.number * size, (replica.number + 1) * size))
        self.replicas += [Replica(config.replicas + number, url) for number, url in enumerate(config.replica_url)]
        self.capacity = config.engine.max_num_seqs
        self.restarted = 0
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "serving"]

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def start(self) -> None:
        """Bring all replicas up, side by side.

        Raises:
            BridgeError: one does not start.
        """
        starting = [asyncio.create_task(self._bring_up(replica, first=True)) for replica in self.replicas]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]

    async def stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(replica.engine.stop() for replica in self.replicas if replica.engine))

    @contextlib.asynccontextmanager
    async def lease(self, session: str) -> AsyncIterator[tuple[Replica, Engine]]:
        """A place in a replica for one request, waiting in line for it.

        Raises:
            Overloaded: too many wait already, or no replica is left.
        """
        replica = self._choose(session) if not self._waiting else None
        while replica is None:
            await self._stand_in_line()
            replica = self._choose(session)
        assert replica.engine is not None
        replica.in_flight += 1
        try:
            yield replica, replica.engine
        finally:
            replica.in_flight -= 1
            self._wake(1)

    def _choose(self, session: str) -> Replica | None:
        home = self._homes.get(session)
        if home is None or home.state != "serving" or home.in_flight >= self.capacity:
            free = [replica for replica in self.serving if replica.in_flight < self.capacity]
            if not free:
                return None
            home = min(free, key=lambda replica: replica.in_flight)
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > _REMEMBERED_SESSIONS:
            self._homes.popitem(last=False)
        return home

    def forget(self, session: str) -> None:
        """A session has ended: its home is nobody's business any more."""
        self._homes.pop(session, None)

    async def _stand_in_line(self) -> None:
        if all(replica.state == "failed" for replica in self.replicas):
            raise Overloaded(503, "no replica is left; the bridge's log says why")
        if len(self._waiting) >= self.config.max_queued:
            raise Overloaded(429, f"{len(self._waiting)} requests wait already (max_queued); try again later")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._wake(1)  # somebody else may use what this request leaves behind
            else:
                self._waiting.remove(place)
            raise

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                count -= 1

    def evict(self, replica: Replica, reason: str) -> None:
        """Take a replica out because it failed; its requests start again elsewhere, it comes back repaired."""
        if replica.state == "serving":
            replica.state = "starting"
        replica.reason = reason
        replica.evicted.set()

    async def is_gone(self, replica: Replica) -> bool:
        """Whether a replica that broke off an answer is lost altogether; it is then taken out at once."""
        engine = replica.engine
        if replica.state != "serving" or engine is None:
            return True
        try:
            await engine.get("/health")
        except (aiohttp.ClientError, TimeoutError) as error:
            if replica.engine is engine:
                self.evict(replica, f"it broke off an answer, and /health says: {error!r}")
            return True
        return False

    def set_stale(self, replica: Replica) -> None:
        replica.state = "stale"

    def set_serving(self, replica: Replica) -> None:
        """The replica holds the current weights."""
        replica.state = "serving"
        self._wake(self.capacity)

    async def _bring_up(self, replica: Replica, first: bool) -> None:
        config = self.config
        if replica.url:
            timeout = config.engine.start_timeout
            engine = await Engine.attach(replica.url, self.session, config.replica_token, timeout)
        else:
            log = config.log_dir / f"vllm_{replica.number}.log" if config.log_dir else None
            engine = await Engine.start(config.engine, self.session, log, replica.gpus)
        replica.engine = engine
        try:
            await self.give_weights(engine, first)
        except Stale as error:
            logger.warning("%s waits for the next weights: %s", replica.name, error)
            self.set_stale(replica)
            return
        except BaseException:
            await engine.stop()
            replica.engine = None
            raise
        replica.evicted.clear()
        self.set_serving(replica)

    async def _keep(self, replica: Replica) -> None:
        """Watch one replica, and bring it up again whenever it is lost."""
        while replica.state != "failed":
            reason = await self._lost(replica)
            replica.state = "starting"
            logger.error("%s is lost: %s", replica.name, reason)
            for flight in [flight for flight in self.gate.flights if flight.replica == replica.number]:
                flight.interrupt(f"{replica.name} was lost")
            engine, replica.engine = replica.engine, None
            if engine:
                await engine.stop()
            await self._restart(replica, reason)

    async def _lost(self, replica: Replica) -> str:
        assert replica.engine is not None
        tasks = [asyncio.create_task(replica.engine.ended()), asyncio.create_task(replica.evicted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else replica.reason
        finally:
            for task in tasks:
                task.cancel()

    async def _restart(self, replica: Replica, reason: str) -> None:
        while True:
            now = time.monotonic()
            while replica.restarts and now - replica.restarts[0] > _RESTART_WINDOW:
                replica.restarts.popleft()
            if len(replica.restarts) >= self.config.max_restarts:
                replica.state = "failed"
                logger.error("%s is given up after %d restarts (max_restarts)", replica.name, len(replica.restarts))
                if all(other.state == "failed" for other in self.replicas) and not self.failed.done():
                    self.failed.set_result(reason)
                self._wake(len(self._waiting))
                return
            await asyncio.sleep(_BACKOFF[min(len(replica.restarts), len(_BACKOFF) - 1)])
            replica.restarts.append(now)
            self.restarted += 1
            replica.evicted.clear()
            try:
                await waiting_for(self._bring_up(replica, first=False), f"{replica.name} to come back")
                logger.info("%s is back (%s)", replica.name, replica.state)
                return
            except BridgeError as error:
                reason = str(error)
                logger.error("%s did not come back: %s", replica.name, reason)
