"""Keeps captured calls by session until somebody picks them up, and on disk where a folder is given."""

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from bridge.observe import Metrics
from bridge.protocol import ModelCall, VersionSpan
from bridge.record import Generation
from bridge.sequences import samples_from_calls
from bridge.storage import CallLog

logger = logging.getLogger("bridge")


class CaptureStore:
    """Captured calls, oldest session first. Beyond `limit` calls the oldest sessions are dropped, and counted."""

    def __init__(self, limit: int, metrics: Metrics, log: CallLog | None = None) -> None:
        self.limit, self.metrics, self.log = limit, metrics, log
        self.size = 0
        self.dropped = 0
        self._calls: OrderedDict[str, list[ModelCall]] = OrderedDict()
        self._next_index: defaultdict[str, int] = defaultdict(int)
        self._running: defaultdict[str, int] = defaultdict(int)
        self._last_end: dict[str, float] = {}

    def begin(self, session: str) -> int:
        """A call arrives; gives its number in its session, in the order of arrival."""
        index = self._next_index[session]
        self._next_index[session] += 1
        self._running[session] += 1
        return index

    def end(self, session: str) -> None:
        """A call that began is answered, or is given up."""
        self._running[session] -= 1
        if not self._running[session]:
            del self._running[session]
            if session in self._calls:
                self._last_end[session] = time.monotonic()
            else:
                self._next_index.pop(session, None)

    def add(self, call: ModelCall) -> None:
        if self.log:
            self.log.append(call)
        self.metrics.captured(len(call.completion_ids))
        self._calls.setdefault(call.session, []).append(call)
        self.size += 1
        while self.size > self.limit:
            session, calls = self._calls.popitem(last=False)
            self._forget(session)
            self.size -= len(calls)
            self.dropped += len(calls)
            if self.dropped % 1000 < len(calls):
                logger.warning("%d captured calls dropped that nobody picked up (max_captured_calls)", self.dropped)

    def take(self, sessions: Iterable[str]) -> dict[str, list[ModelCall]]:
        """Hand out and forget the calls of `sessions`; a session without any gives an empty list."""
        taken = {}
        for session in sessions:
            calls = taken[session] = sorted(self._calls.pop(session, []), key=lambda call: call.index)
            self._forget(session)
            self.size -= len(calls)
            if len(calls) > 1:
                for sample in samples_from_calls(calls):
                    if sample.fork:
                        self.metrics.forked(sample.fork)
                        logger.info("session %s forks: %s", session, sample.fork)
        return taken

    def idle(self, seconds: float, limit: int) -> list[str]:
        """Up to `limit` sessions whose last call ended `seconds` ago or earlier, and that run none now."""
        before = time.monotonic() - seconds
        found = []
        for session, ended in self._last_end.items():
            if len(found) == limit:
                break
            if ended <= before and session not in self._running:
                found.append(session)
        return found

    def _forget(self, session: str) -> None:
        self._last_end.pop(session, None)
        if session not in self._running:
            self._next_index.pop(session, None)


def calls_from(record: Iterable[Generation], *, queued: float, dialect: str, **known: object) -> list[ModelCall]:
    """The captured calls of an engine's record, one per choice.

    Args:
        known: fields of `ModelCall` that the record does not tell.

    Raises:
        BridgeError: a token lacks its logprob or its version.
    """
    return [
        ModelCall(
            prompt_ids=generation.prompt_ids,
            completion_ids=choice.ids,
            logprobs=choice.logprobs,
            versions=[VersionSpan(*span) for span in choice.versions],
            sampling={name: value for name, value in generation.sampling.items() if value is not None},
            finish_reason=choice.finish_reason,
            queued=queued,
            first_token=generation.first_token,
            end=time.time(),
            dialect=dialect,
            **known,  # pyright: ignore[reportArgumentType]
        )
        for generation in record
        for choice in generation.choices
    ]
