"""Joins the calls of a session into token sequences that can be trained: nothing is ever tokenized again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bridge.protocol import BridgeError, ModelCall, Sample


@dataclass
class _Growing:
    """A sample under construction, while later calls of the session may still extend it."""

    fork: str
    temperature: float
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
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
        self.finish_reason = call.finish_reason
        self.latency += call.end - call.queued

    def common(self, prompt: Sequence[int]) -> int:
        """How many leading tokens the sequence shares with `prompt`."""
        length = min(len(self.ids), len(prompt))
        if self.ids[:length] == list(prompt[:length]):
            return length
        return next(i for i in range(length) if self.ids[i] != prompt[i])


def temperature_of(call: ModelCall) -> float:
    return float(call.sampling.get("temperature", 1.0))


def samples_from_calls(calls: Sequence[ModelCall]) -> list[Sample]:
    """Join the calls of one session into as few token sequences as exactness allows.

    A call whose prompt starts with the ids of an earlier sequence extends it. A call whose prompt differs anywhere
    (rewritten history, another branch, text that a client rendered again), or that was sampled at another temperature,
    starts a sequence of its own, whose `fork` says why. Calls that failed hold no tokens and are left out.

    Raises:
        BridgeError: calls of different sessions.
    """
    growing: list[_Growing] = []
    for call in sorted(calls, key=lambda call: call.index):
        if call.session != calls[0].session:
            raise BridgeError(f"calls of sessions {calls[0].session} and {call.session} cannot form one sample")
        if call.error:
            continue
        temperature = temperature_of(call)
        matches = [
            s for s in growing if call.prompt_ids[: len(s.ids)] == s.ids and math.isclose(s.temperature, temperature)
        ]
        target = max(matches, key=lambda s: len(s.ids), default=None)
        if target is None:
            target = _Growing(_why_it_forks(growing, call), temperature)
            growing.append(target)
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
            fork=s.fork,
        )
        for s in growing
    ]


def _why_it_forks(growing: Sequence[_Growing], call: ModelCall) -> str:
    """`branch`: left within a prompt; `rewritten`: within sampled tokens; `shortened`: the prompt ends before them;
    `temperature`: the tokens would continue a sequence that was sampled differently."""
    if not growing:
        return ""
    nearest = max(growing, key=lambda s: s.common(call.prompt_ids))
    at = nearest.common(call.prompt_ids)
    if at == len(nearest.ids):
        return f"temperature: {temperature_of(call):g} where the sequence has {nearest.temperature:g}"
    if at == len(call.prompt_ids):
        return f"shortened: the prompt ends at token {at} of {len(nearest.ids)}"
    kind = "rewritten" if nearest.sampled[at] else "branch"
    return f"{kind}: token {at} is {call.prompt_ids[at]} where the sequence has {nearest.ids[at]}"
