import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import AdvantageKind, group_advantages

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)
kinds = st.sampled_from(["mean", "mean_std", "rloo"])


def test_advantage_is_reward_minus_group_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_standardized_advantage_divides_by_the_population_standard_deviation():
    values = group_advantages([1.0, 0.0, 0.0, 0.0], "mean_std")
    assert values == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / np.sqrt(3 / 16), rel=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_the_leave_one_out_baseline_is_the_mean_of_the_others(rewards):
    expected = [r - np.mean([o for j, o in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, "rloo") == pytest.approx(np.asarray(expected), abs=1e-9)


@given(rewards, kinds)
def test_advantages_of_a_group_sum_to_zero(rewards, kind: AdvantageKind):
    assert abs(group_advantages(rewards, kind).sum()) < 1e-6 * (1 + 1e6 * (kind == "mean_std"))


@given(st.floats(-10, 10), st.integers(1, 8), kinds)
def test_a_group_of_equal_rewards_has_no_advantage(reward, size, kind: AdvantageKind):
    assert group_advantages([reward] * size, kind) == pytest.approx(np.zeros(size), abs=1e-8)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")])
