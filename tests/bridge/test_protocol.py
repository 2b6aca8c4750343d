import numpy as np
import pytest

from bridge.protocol import BridgeError, ModelCall, VersionSpan
from bridge.sequences import samples_from_calls


def call(index: int, prompt: list[int], completion: list[int], version: int = 0, temperature: float = 1.0) -> ModelCall:
    return ModelCall(
        session="s",
        index=index,
        dialect="v1/chat/completions",
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-float(i) for i in completion],
        versions=[VersionSpan(version, 0, len(completion))],
        sampling={"temperature": temperature},
        finish_reason="stop",
        queued=0.0,
        first_token=0.5,
        end=1.0,
    )


def test_a_single_call_becomes_one_sample_with_its_own_ids_and_logprobs():
    (sample,) = samples_from_calls([call(0, [1, 2], [3, 4], version=7)])
    assert sample.ids.tolist() == [1, 2, 3, 4]
    assert sample.sampled.tolist() == [False, False, True, True]
    assert sample.logprobs.tolist() == [0.0, 0.0, -3.0, -4.0]
    assert sample.versions.tolist() == [-1, -1, 7, 7]
    assert sample.oldest_version == 7


def test_a_call_that_extends_an_earlier_one_joins_its_sample():
    (sample,) = samples_from_calls([call(0, [1, 2], [3]), call(1, [1, 2, 3, 8, 9], [4, 5], version=1)])
    assert sample.ids.tolist() == [1, 2, 3, 8, 9, 4, 5]
    assert np.flatnonzero(sample.sampled).tolist() == [2, 5, 6]
    assert sample.oldest_version == 0


def test_a_rewritten_history_starts_a_sample_of_its_own():
    samples = samples_from_calls([call(0, [1, 2], [3]), call(1, [1, 2, 99, 8], [4])])
    assert [s.ids.tolist() for s in samples] == [[1, 2, 3], [1, 2, 99, 8, 4]]


def test_two_calls_from_one_prompt_are_two_samples_and_no_token_is_trained_twice():
    samples = samples_from_calls([call(0, [1], [2]), call(1, [1], [3]), call(2, [1, 3], [4])])
    assert [s.ids.tolist() for s in samples] == [[1, 2], [1, 3, 4]]
    assert sum(s.response_length for s in samples) == 3


def test_tokens_of_another_temperature_are_a_sample_of_their_own():
    first, second = samples_from_calls([call(0, [1], [2]), call(1, [1, 2], [3], temperature=0.5)])
    assert (first.temperature, second.temperature) == (1.0, 0.5)
    assert second.sampled.tolist() == [False, False, True] and second.fork.startswith("temperature: 0.5")


@pytest.mark.parametrize(
    ("prompt", "fork"),
    [
        ([1, 2, 3, 8], ""),
        ([1, 9, 3, 8], "branch: token 1 is 9 where the sequence has 2"),
        ([1, 2, 7, 8], "rewritten: token 2 is 7 where the sequence has 3"),
        ([1, 2], "shortened: the prompt ends at token 2 of 3"),
    ],
)
def test_a_sample_says_why_it_does_not_continue_an_earlier_one(prompt: list[int], fork: str):
    samples = samples_from_calls([call(0, [1, 2], [3]), call(1, prompt, [4])])
    assert samples[0].fork == "" and samples[-1].fork == fork


def test_a_failed_call_leaves_no_sample():
    failed = ModelCall(**{**vars(call(1, [], [])), "error": "answered with 500"})
    assert len(samples_from_calls([call(0, [1], [2]), failed])) == 1
    assert samples_from_calls([failed]) == []


def test_a_call_must_have_one_logprob_for_each_token_and_spans_without_gaps():
    good = call(0, [1], [2, 3])
    with pytest.raises(BridgeError, match="2 sampled tokens but 1 logprobs"):
        ModelCall(**{**vars(good), "logprobs": [-1.0]})
    with pytest.raises(BridgeError, match="version spans"):
        ModelCall(**{**vars(good), "versions": [VersionSpan(0, 0, 1)]})
    with pytest.raises(BridgeError, match="gap"):
        ModelCall(**{**vars(good), "versions": [VersionSpan(0, 0, 1), VersionSpan(1, 2, 2)]})
