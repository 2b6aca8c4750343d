"""The plain data that the bridge, its clients and the trainer share: what one captured call and one sample hold."""

from dataclasses import asdict, dataclass
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
        queued, first_token, end: seconds since the epoch: request received, first token there, answer complete.
        replica: which engine answered.
        retries: how often the call was started again before, because an engine failed or an update overtook it.
        error: why there is no answer; such a call holds no tokens.
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
    retries: int = 0
    error: str = ""

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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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
        fork: why the sequence does not continue an earlier one of its session; empty for a session's first.
    """

    session: str
    ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    temperature: float
    finish_reason: str
    latency: float = 0.0
    fork: str = ""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.sampled) == len(self.logprobs) == len(self.versions):
            raise BridgeError(f"sample of session {self.session} has arrays of different lengths")

    @property
    def response_length(self) -> int:
        return int(self.sampled.sum())

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.sampled].min())
