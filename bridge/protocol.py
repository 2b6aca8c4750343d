"""The plain data that the bridge, its clients and the trainer share: what one captured call and one sample hold."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

SESSION_HEADER = "X-Session-ID"


class BridgeError(RuntimeError):
    """The bridge or its engine could not do what was asked; the message says what to change."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `[start, end)` of a completion were sampled by policy `version` (number of updates behind the weights)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class ModelCall:
    """One choice of one captured request, exactly as the engine sampled it.

    Args:
        session: value of the client's `X-Session-ID` header; a generated id where it sent none.
        index: position of the call in its session, from 0.
        dialect: request path without its leading slash, such as `v1/chat/completions`.
        prompt_ids: token ids the engine was given, [prompt length].
        completion_ids: sampled token ids, [completion length], an end token included.
        logprobs: natural-log probability of each sampled token under the sampling distribution, float32 values.
        versions: policy versions of the completion's tokens, in order, covering all of them.
        sampling: sampling parameters of the request (temperature, top_p, max_tokens, seed, ...).
        finish_reason: `stop`, `length` or `abort`.
        queued, first_token, end: seconds since the epoch: request received, first answer byte, answer complete.
        replica: which engine answered.
    """

    session: str
    index: int
    dialect: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    sampling: dict[str, Any]
    finish_reason: str
    queued: float
    first_token: float
    end: float
    replica: int = 0

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise BridgeError(
                f"session {self.session} call {self.index}: {len(self.completion_ids)} sampled tokens "
                f"but {len(self.logprobs)} logprobs"
            )
        covered = 0
        for span in self.versions:
            if span.start != covered or span.end < span.start:
                raise BridgeError(f"session {self.session} call {self.index}: a gap in {self.versions}")
            covered = span.end
        if covered != len(self.completion_ids):
            raise BridgeError(
                f"session {self.session} call {self.index}: version spans end at {covered}, "
                f"the completion has {len(self.completion_ids)} tokens"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelCall":
        return cls(**{**data, "versions": [VersionSpan(**span) for span in data["versions"]]})


@dataclass(frozen=True)
class Sample:
    """One trainable token sequence of a session: T tokens, of which the sampled ones are trained.

    Args:
        session: the session it was captured from.
        ids: token ids, int32 [T].
        sampled: True where the policy chose the token, bool [T].
        logprobs: behaviour logprob of each sampled token, 0 elsewhere, float32 [T].
        versions: policy version of each sampled token, -1 elsewhere, int32 [T].
        temperature: the sampling temperature of its calls.
        finish_reason: that of its last call.
        latency: seconds the engine spent on its calls, queueing included.
    """

    session: str
    ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float
    finish_reason: str
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.sampled) == len(self.logprobs) == len(self.versions):
            raise BridgeError(f"sample of session {self.session} has arrays of different lengths")

    @property
    def response_length(self) -> int:
        return int(self.sampled.sum())

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.sampled].min())


@dataclass
class _Growing:
    """A sample under construction, while later calls of the session may still extend it."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperature: float = 1.0
    finish_reason: str = ""
    latency: float = 0.0

    def append(self, call: ModelCall) -> None:
        prompt = call.prompt_ids[len(self.ids) :]
        self.ids += prompt + call.completion_ids
        self.sampled += [False] * len(prompt) + [True] * len(call.completion_ids)
        self.logprobs += [0.0] * len(prompt) + call.logprobs
        self.versions += [-1] * len(prompt)
        for span in call.versions:
            self.versions += [span.version] * (span.end - span.start)
        self.temperature = float(call.sampling.get("temperature", 1.0))
        self.finish_reason = call.finish_reason
        self.latency += call.end - call.queued


def samples_from_calls(calls: Sequence[ModelCall]) -> list[Sample]:
    """Join the calls of one session into as few token sequences as exactness allows.

    A call whose prompt starts with the ids of an earlier sequence extends it: nothing is tokenized again. A call whose
    prompt differs anywhere (rewritten history, another branch) starts a sequence of its own.

    Raises:
        BridgeError: calls of different sessions, or two temperatures within one sequence.
    """
    growing: list[_Growing] = []
    for call in sorted(calls, key=lambda call: call.index):
        if call.session != calls[0].session:
            raise BridgeError(f"calls of sessions {calls[0].session} and {call.session} cannot form one sample")
        matches = [s for s in growing if call.prompt_ids[: len(s.ids)] == s.ids]
        target = max(matches, key=lambda s: len(s.ids), default=None)
        if target is None:
            target = _Growing()
            growing.append(target)
        elif not math.isclose(target.temperature, float(call.sampling.get("temperature", 1.0))):
            raise BridgeError(f"session {call.session} changes its temperature within one sequence")
        target.append(call)
    return [
        Sample(
            session=calls[0].session,
            ids=np.asarray(s.ids, dtype=np.int32),
            sampled=np.asarray(s.sampled, dtype=bool),
            logprobs=np.asarray(s.logprobs, dtype=np.float32),
            versions=np.asarray(s.versions, dtype=np.int32),
            temperature=s.temperature,
            finish_reason=s.finish_reason,
            latency=s.latency,
        )
        for s in growing
    ]
