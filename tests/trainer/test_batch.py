import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.protocol import Sample
from trainer.batch import MicroBatch, make_batch

shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20)


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


def samples_of(shapes: list[tuple[int, int]]) -> list[Sample]:
    return [sample(prompt, response, 1000 * i) for i, (prompt, response) in enumerate(shapes)]


def before(micro: MicroBatch) -> torch.Tensor:
    """The token whose logits speak of each trained token."""
    return micro.ids_RL.flatten()[micro.index_T]


def test_each_trained_token_is_spoken_of_by_the_position_before_it():
    (micro,) = make_batch([sample(2, 3)], [0.5], 1000).micro_batches
    assert micro.ids_RL.tolist() == [[1, 2, 3, 4, 5]]
    assert micro.targets_T.tolist() == [3, 4, 5] and before(micro).tolist() == [2, 3, 4]
    assert micro.behaviour_T.tolist() == [-3.0, -4.0, -5.0]
    assert micro.advantages_T.tolist() == [0.5] * 3


@given(shapes, st.integers(1, 200), st.booleans(), st.booleans())
def test_each_sampled_token_is_trained_exactly_once_whatever_the_split(shapes, limit, packed, fill):
    samples = samples_of(shapes)
    advantages = [float(i) for i in range(len(samples))]
    batch = make_batch(samples, advantages, limit, packed=packed, fill=packed and fill)
    seen = sorted(t for micro in batch.micro_batches for t in micro.targets_T.tolist())
    assert seen == sorted(int(t) for s in samples for t in s.ids[s.sampled])
    assert batch.trained_tokens == len(seen)
    for micro in batch.micro_batches:
        assert (before(micro) + 1 == micro.targets_T).all()
        assert (micro.targets_T // 1000 == micro.advantages_T.long()).all()


@given(shapes, st.integers(1, 200))
def test_packed_sequences_are_kept_apart_by_position_and_boundary(shapes, limit):
    for fill in (False, True):
        for micro in make_batch(samples_of(shapes), [0.0] * len(shapes), limit, packed=True, fill=fill).micro_batches:
            assert micro.positions_RL is not None and micro.boundaries_S is not None
            starts = micro.boundaries_S[:-1][micro.boundaries_S.diff() > 0]
            assert torch.equal(torch.nonzero(micro.positions_RL[0] == 0)[:, 0], starts.long())
            assert int(micro.boundaries_S[-1]) == micro.ids_RL.numel()
            assert int(micro.boundaries_S.diff().max()) <= micro.longest


def test_filled_micro_batches_have_one_shape_whatever_is_in_them():
    found = set()
    for seed in range(5):
        generator = np.random.default_rng(seed)
        samples = [sample(5, int(generator.integers(1, 60)), 1000 * i) for i in range(16)]
        for micro in make_batch(samples, [0.0] * 16, 256, packed=True, fill=True).micro_batches:
            assert micro.boundaries_S is not None
            found.add((micro.ids_RL.shape, micro.boundaries_S.shape, micro.longest))
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_the_weights_are_those_of_the_papers(kind):
    samples = [sample(2, 3), sample(4, 7, 100), sample(1, 1, 200)]
    batch = make_batch(samples, [0.0] * 3, 6, kind=kind, horizon=32)
    weights = {
        int(token): float(weight)
        for micro in batch.micro_batches
        for token, weight in zip(micro.targets_T, micro.weights_T, strict=True)
    }
    for one in samples:
        count = one.response_length
        expected = {"dapo": 1 / 11, "grpo": 1 / (3 * count), "dr_grpo": 1 / (3 * 32)}[kind]
        assert [weights[int(token)] for token in one.ids[one.sampled]] == pytest.approx([expected] * count)


def test_a_token_without_a_finite_logprob_leaves_the_loss_and_the_count():
    broken = sample(2, 3)
    broken.logprobs[3] = np.nan
    batch = make_batch([broken], [1.0], 1000)
    assert (batch.trained_tokens, batch.dropped_tokens) == (2, 1)
    assert batch.micro_batches[0].targets_T.tolist() == [3, 5]
    assert batch.micro_batches[0].weights_T.tolist() == [0.5, 0.5]


def test_a_batch_with_nothing_to_train_on_is_refused():
    broken = sample(2, 1)
    broken.logprobs[:] = np.nan
    with pytest.raises(ValueError, match="nothing to train on"):
        make_batch([broken], [1.0], 1000)
