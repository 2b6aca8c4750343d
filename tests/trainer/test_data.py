from hypothesis import given
from hypothesis import strategies as st

from trainer.data import TaskOrder


@given(st.integers(1, 20), st.integers(0, 50), st.integers(0, 5))
def test_order_depends_on_seed_and_position_alone(size, position, seed):
    straight = TaskOrder(range(size), seed)
    straight.take(position)
    assert straight.take(30) == TaskOrder(range(size), seed, position).take(30)


@given(st.integers(1, 20), st.integers(0, 5))
def test_each_epoch_holds_every_task_once(size, seed):
    order = TaskOrder(range(size), seed)
    assert sorted(order.take(size)) == sorted(order.take(size)) == list(range(size))
