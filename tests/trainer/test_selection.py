import numpy as np
import pytest

from bridge.protocol import Sample
from tests.trainer.test_batch import sample
from trainer.config import GrpoConfig
from trainer.rollouts import Episode, Group
from trainer.selection import has_spread, select, shaped_reward


def episode(reward: float, response: int = 4, truncated: bool = False, version: int = 0) -> Episode:
    one = sample(3, response)
    one = Sample(**{**vars(one), "versions": np.where(one.sampled, version, -1).astype(np.int32)})
    return Episode("t", "p", "r", reward, {}, {}, [one], truncated, 1.0)


def config(**settings: object) -> GrpoConfig:
    return GrpoConfig(**settings)  # pyright: ignore[reportArgumentType]


MIXED = Group([episode(1.0), episode(0.0), episode(0.0), episode(0.0)])
EQUAL = Group([episode(0.0), episode(0.0)])


def test_every_episode_is_trained_with_its_groups_advantage():
    selection = select([MIXED, EQUAL], 0, config())
    assert selection.advantages == [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    assert [values.tolist() for values in selection.by_group] == [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0]]
    assert has_spread(MIXED) and not has_spread(EQUAL)


def test_a_group_without_spread_is_dropped_where_that_is_chosen():
    selection = select([MIXED, EQUAL], 0, config(zero_spread={"rule": "drop"}))
    assert len(selection.samples) == 4 and selection.dropped_groups == 1
    assert select([EQUAL], 0, config(zero_spread={"rule": "drop"})).samples == []


def test_a_masked_truncated_answer_leaves_the_loss_but_not_the_baseline():
    group = Group([episode(1.0), episode(0.0, truncated=True)])
    selection = select([group], 0, config(truncation={"rule": "mask"}))
    assert selection.advantages == [0.5] and selection.masked == 1


@pytest.mark.parametrize(("length", "penalty"), [(60, 0.0), (80, 0.0), (90, 0.25), (100, 0.5)])
def test_the_soft_penalty_grows_over_the_buffer(length: int, penalty: float):
    settings = config(truncation={"rule": "penalty", "penalty_buffer": 20, "penalty_factor": 0.5})
    assert shaped_reward(episode(1.0, length), settings.truncation, 100) == pytest.approx(1.0 - penalty)


def test_samples_beyond_the_bound_are_left_out_and_counted():
    group = Group([episode(1.0, version=6), episode(0.0, version=7)])
    selection = select([group], 7, config())
    assert selection.stale == 1 and selection.advantages == [-0.5]


def test_a_penalty_buffer_longer_than_the_answers_is_refused():
    with pytest.raises(ValueError, match="every answer would lose reward"):
        config(truncation={"rule": "penalty", "penalty_buffer": 4096})
