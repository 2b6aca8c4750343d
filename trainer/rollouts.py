"""Where episodes come from: groups of Verifiers episodes, each joined with what the bridge captured of it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvClient
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig as VerifiersSampling

from bridge.client import BridgeClient
from bridge.protocol import Sample
from bridge.sequences import samples_from_calls
from trainer.config import SamplingConfig
from trainer.errors import UserError

LOGPROB_TOLERANCE = 1e-6

WireTrace = Trace[Any, Any, Any]


@dataclass(frozen=True)
class Episode:
    """One finished attempt at a task.

    Args:
        task_id: durable id of the task, or its content hash.
        prompt, response: the text as the environment saw it, for people.
        reward: total reward; `rewards` its weighted parts by name.
        metrics: the environment's own numbers by name.
        samples: its token sequences, from the capture.
        truncated: the length limit ended it.
        seconds: wall time from start to score.
    """

    task_id: str
    prompt: str
    response: str
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    samples: list[Sample]
    truncated: bool
    seconds: float


@dataclass
class Group:
    """The episodes of one prompt, and why those that are missing failed (cause: count)."""

    episodes: list[Episode]
    failures: Counter[str] = field(default_factory=Counter)


class EpisodeFailed(Exception):
    """An episode without a result, never a reward.

    Args:
        cause: `environment`, `engine` or `verifier_timeout`.
        message: what its error said.
        sessions: its sessions, whose captured calls nobody will train on.
    """

    def __init__(self, cause: str, message: str, sessions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.cause, self.sessions = cause, sessions


class VerifiersRollouts:
    """Samples episodes through a Verifiers environment server whose model calls go through the bridge.

    Args:
        environment: client of the environment server.
        bridge: client of the bridge.
        model: model name at the bridge.
        tokenizer: folder or hub id that Verifiers' renderer loads its tokenizer and chat template from.
        sampling: training's sampling settings.
    """

    def __init__(
        self, environment: EnvClient, bridge: BridgeClient, model: str, tokenizer: str, sampling: SamplingConfig
    ) -> None:
        self.environment, self.bridge, self.model, self.sampling = environment, bridge, model, sampling
        self.client = TrainClientConfig(
            base_url=f"{bridge.url}/v1", api_key_var="VF_GRPO_NO_KEY", renderer_model_name=tokenizer, multiplex=256
        )

    async def sample_groups(
        self, tasks: Sequence[Task], samples_per_prompt: int, stream: tuple[int, int]
    ) -> list[Group]:
        """One group per task, all sampled at once. Failed episodes are counted in their group, not scored.

        Args:
            stream: what the groups are for and the step; tells their random seeds apart.

        Raises:
            UserError: every single episode failed; the first cause is quoted.
        """
        runs = [
            self._episode(task, self._sampling(stream, prompt, sample))
            for prompt, task in enumerate(tasks)
            for sample in range(samples_per_prompt)
        ]
        results = await asyncio.gather(*runs, return_exceptions=True)
        groups = [Group([]) for _ in tasks]
        records: list[tuple[int, WireEpisode]] = []
        abandoned: list[str] = []
        failure = ""
        for number, result in enumerate(results):
            group = groups[number // samples_per_prompt]
            if isinstance(result, EpisodeFailed):
                group.failures[result.cause] += 1
                abandoned += result.sessions
                failure = failure or str(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                records.append((number // samples_per_prompt, result))
        if not records:
            raise UserError(f"all {len(results)} episodes failed; the first: {failure}")
        sessions = [trace.id for _, record in records for trace in record.traces]  # judges' too, or they would stay
        captured = await self.bridge.take_calls([*sessions, *abandoned])
        for prompt, record in records:
            samples = []
            for trace in _trainable(record):
                of_trace = samples_from_calls(captured[trace.id])
                check_witnesses(trace, of_trace)
                samples += of_trace
            groups[prompt].episodes.append(_episode_from(record, samples))
        return groups

    def _sampling(self, stream: tuple[int, int], prompt: int, sample: int) -> VerifiersSampling:
        settings = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
        }
        if self.sampling.seed is not None:
            sequence = np.random.SeedSequence((self.sampling.seed, *stream, prompt, sample))
            settings["seed"] = int(sequence.generate_state(1)[0])
        return VerifiersSampling(**settings)

    async def _episode(self, task: Task, sampling: VerifiersSampling) -> WireEpisode:
        try:
            record = await self.environment.run(
                client=self.client, model=self.model, sampling=sampling, task_data=task.data.model_dump(mode="json")
            )
        except RuntimeError as error:
            raise EpisodeFailed("environment", str(error)) from error
        sessions = [trace.id for trace in record.traces]
        errors = [*record.errors, *(error for trace in record.traces for error in trace.errors)]
        if not record.ok or errors:
            types = {error.type for error in errors}
            cause = "engine" if "ProviderError" in types else "environment"
            message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
            raise EpisodeFailed(cause, message, sessions)
        if record.is_timeout or any(trace.is_timeout for trace in record.traces):
            raise EpisodeFailed("verifier_timeout", "a stage of the episode ran into its deadline", sessions)
        return record


def check_witnesses(trace: WireTrace, samples: Sequence[Sample]) -> None:
    """Verifiers' trace and the bridge's capture must tell the same tokens and logprobs of one session.

    Where the conversation branches, a token sampled before the fork belongs to several branches of the trace but to one
    sample alone, so a sample's mask may be smaller than its branch's.

    Raises:
        UserError: they differ; the message names the session and the first difference.
    """
    branches = {tuple(branch.token_ids): branch for branch in trace.branches}
    for sample in samples:
        branch = branches.get(tuple(sample.ids.tolist()))
        if branch is None:
            raise UserError(
                f"session {trace.id}: the tokens in Verifiers' trace are not those that the engine sampled "
                f"({[len(ids) for ids in branches]} against {len(sample.ids)} tokens)"
            )
        mask = np.asarray(branch.sampled_mask, bool)
        if (sample.sampled & ~mask).any() or (len(branches) == 1 and (mask != sample.sampled).any()):
            raise UserError(f"session {trace.id}: Verifiers and the bridge disagree about which tokens were sampled")
        theirs = np.asarray(branch.logprobs, np.float32)[sample.sampled]
        difference = np.abs(theirs - sample.logprobs[sample.sampled]).max()
        if difference > LOGPROB_TOLERANCE:
            raise UserError(f"session {trace.id}: logprobs in trace and capture differ by {difference:.3g}")


def _trainable(record: WireEpisode) -> list[WireTrace]:
    return [trace for trace in record.traces if trace.agent.trainable]


def _episode_from(record: WireEpisode, samples: list[Sample]) -> Episode:
    traces = _trainable(record)
    data = record.task.data
    replies = [message for trace in traces for message in trace.assistant_messages]
    return Episode(
        task_id=str(data.id or record.task.key),
        prompt=data.prompt_text,
        response=(replies[-1].content or "") if replies else "",
        reward=float(sum(trace.reward for trace in traces)),
        rewards={name: reward.value for trace in traces for name, reward in trace.rewards.items() if reward},
        metrics={name: value for trace in traces for name, value in trace.metrics.items() if value is not None},
        samples=samples,
        truncated=any(trace.is_truncated for trace in traces),
        seconds=sum(trace.timing.agent.duration for trace in traces),
    )
