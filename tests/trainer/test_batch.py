import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.protocol import Sample
from trainer.batch import make_batch


def sample(prompt: int, response: int, start: int = 0) -> Sample:
    length = prompt + response
    return Sample(
        session=f"s{start}",
        ids=np.arange(start + 1, start + 1 + length, dtype=np.int32),
        sampled=np.arange(length) >= prompt,
        logprobs=np.where(np.arange(length) >= prompt, -1.0 - np.arange(length), 0).astype(np.float32),
        versions=np.where(np.arange(length) >= prompt, 0, -1).astype(np.int32),
        temperature=1.0,
        finish_reason="stop",
    )


def test_every_position_speaks_of_the_next_token():
    (micro,) = make_batch([sample(2, 3)], [0.5], 1000).micro_batches
    assert micro.ids_RL.tolist() == [[1, 2, 3, 4, 5]]
    assert micro.targets_RL.tolist() == [[2, 3, 4, 5, 0]]
    assert micro.trained_RL.tolist() == [[False, True, True, True, False]]
    assert micro.behaviour_RL[micro.trained_RL].tolist() == [-3.0, -4.0, -5.0]
    assert micro.advantages_RL[micro.trained_RL].tolist() == [0.5] * 3


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20), st.integers(1, 200))
def test_each_sampled_token_is_trained_exactly_once_whatever_the_split(shapes, limit):
    samples = [sample(prompt, response, 1000 * i) for i, (prompt, response) in enumerate(shapes)]
    batch = make_batch(samples, [float(i) for i in range(len(samples))], limit)
    seen = sorted(t for micro in batch.micro_batches for t in micro.targets_RL[micro.trained_RL].tolist())
    assert seen == sorted(int(t) for s in samples for t in s.ids[s.sampled])
    assert batch.trained_tokens == len(seen)
    for micro in batch.micro_batches:
        assert micro.ids_RL.numel() <= limit or len(micro.ids_RL) == 1
        for token, advantage in zip(
            micro.targets_RL[micro.trained_RL], micro.advantages_RL[micro.trained_RL], strict=True
        ):
            assert token // 1000 == advantage


def test_a_token_without_a_finite_logprob_leaves_the_loss_and_the_count():
    broken = sample(2, 3)
    broken.logprobs[3] = np.nan
    batch = make_batch([broken], [1.0], 1000)
    assert (batch.trained_tokens, batch.dropped_tokens) == (2, 1)
    assert batch.micro_batches[0].targets_RL[batch.micro_batches[0].trained_RL].tolist() == [3, 5]


def test_a_batch_with_nothing_to_train_on_is_refused():
    broken = sample(2, 1)
    broken.logprobs[:] = np.nan
    with pytest.raises(ValueError, match="nothing to train on"):
        make_batch([broken], [1.0], 1000)
