"""Keeps captured calls by session until somebody picks them up."""

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from bridge.dialects import Dialect
from bridge.protocol import BridgeError, ModelCall, VersionSpan

logger = logging.getLogger(__name__)


class CaptureStore:
    """Captured calls, oldest session first. Beyond `limit` calls the oldest sessions are dropped, and counted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.dropped = 0
        self._calls: OrderedDict[str, list[ModelCall]] = OrderedDict()
        self._next_index: defaultdict[str, int] = defaultdict(int)

    def next_index(self, session: str) -> int:
        """The number of a session's next call, in the order in which requests arrive."""
        index = self._next_index[session]
        self._next_index[session] += 1
        return index

    def add(self, call: ModelCall) -> None:
        self._calls.setdefault(call.session, []).append(call)
        self.size += 1
        while self.size > self.limit:
            session, calls = self._calls.popitem(last=False)
            self._next_index.pop(session, None)
            self.size -= len(calls)
            self.dropped += len(calls)
            logger.warning("dropped %d captured calls nobody picked up (%d in all)", len(calls), self.dropped)

    def take(self, sessions: Iterable[str]) -> dict[str, list[ModelCall]]:
        """Hand out and forget the calls of `sessions`; a session without any gives an empty list."""
        taken = {}
        for session in sessions:
            taken[session] = sorted(self._calls.pop(session, []), key=lambda call: call.index)
            self._next_index.pop(session, None)
            self.size -= len(taken[session])
        return taken


def calls_from(
    dialect: Dialect, *, session: str, index: int, version: int, queued: float, first_token: float
) -> list[ModelCall]:
    """The captured calls of a complete answer, one per choice, all of policy `version`.

    Raises:
        BridgeError: the engine's answer lacks token ids, or a token lacks its logprob.
    """
    calls = []
    for _, tokens in sorted(dialect.tokens.items()):
        if not tokens.prompt_ids:
            raise BridgeError(f"the engine's answer to {dialect.path} carries no prompt token ids")
        calls.append(
            ModelCall(
                session=session,
                index=index,
                dialect=dialect.path,
                prompt_ids=tokens.prompt_ids,
                completion_ids=tokens.completion_ids,
                logprobs=tokens.logprobs,
                versions=[VersionSpan(version, 0, len(tokens.completion_ids))],
                sampling=dialect.sampling(),
                finish_reason=tokens.finish_reason,
                queued=queued,
                first_token=first_token,
                end=time.time(),
            )
        )
    return calls
