import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import group_advantages

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def test_advantage_is_reward_minus_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], divide_by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_standardized_advantage_divides_by_the_population_standard_deviation():
    values = group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=True)
    assert values == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / np.sqrt(3 / 16), rel=1e-5)


@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(rewards, divide):
    assert abs(group_advantages(rewards, divide_by_std=divide).sum()) < 1e-6 * (1 + 1e6 * divide)


@given(st.floats(-10, 10), st.integers(1, 8), st.booleans())
def test_a_group_of_equal_rewards_has_no_advantage(reward, size, divide):
    assert group_advantages([reward] * size, divide_by_std=divide) == pytest.approx(np.zeros(size), abs=1e-8)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], divide_by_std=False)
