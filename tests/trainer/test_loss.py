import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import LossConfig
from trainer.loss import policy_loss

CONFIG = LossConfig()


def loss_of(ratios, advantages, count=None):
    p = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    terms = policy_loss(p, torch.zeros(len(ratios)), torch.tensor(advantages), count or len(ratios), CONFIG)
    terms.loss.backward()
    assert p.grad is not None
    return terms, p.grad


def test_at_equal_policies_the_loss_is_minus_the_mean_advantage_and_the_gradient_minus_the_advantage_over_n():
    terms, grad = loss_of([1.0, 1.0], [0.5, -0.25])
    assert terms.loss.item() == pytest.approx(-0.125)
    assert grad.tolist() == pytest.approx([-0.25, 0.125])


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.5, 1.0, 1.28),  # clipped above: clip-higher
        (0.5, 1.0, 0.5),  # a positive advantage is never clipped below
        (0.5, -1.0, -0.8),  # clipped below
        (1.5, -1.0, -1.5),  # a negative advantage is not clipped above ...
        (7.0, -1.0, -3.0),  # ... but the dual clip bounds it
    ],
)
def test_each_clip_acts_where_the_papers_say(ratio, advantage, objective):
    terms, grad = loss_of([ratio], [advantage])
    assert terms.loss.item() == pytest.approx(-objective, rel=1e-6)
    clipped = objective != pytest.approx(ratio * advantage)
    assert (grad.item() == 0) is clipped
    assert sum(terms.sums[name].item() for name in ("clip/low", "clip/high", "clip/dual")) == clipped


def test_any_split_into_micro_batches_gives_the_same_gradient():
    torch.manual_seed(0)
    p, q, a = torch.randn(10), torch.randn(10), torch.randn(10)
    whole = p.clone().requires_grad_()
    policy_loss(whole, q, a, 10, CONFIG).loss.backward()
    parts = p.clone().requires_grad_()
    for piece in (slice(0, 3), slice(3, 4), slice(4, 10)):
        policy_loss(parts[piece], q[piece], a[piece], 10, CONFIG).loss.backward()
    assert whole.grad is not None and parts.grad is not None
    assert torch.allclose(whole.grad, parts.grad, atol=1e-7)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3)), min_size=1, max_size=20))
def test_loss_and_gradient_are_bounded_for_any_logprobs(tokens):
    p, q, a = (torch.tensor(column) for column in zip(*tokens, strict=True))
    p.requires_grad_()
    terms = policy_loss(p, q, a, len(tokens), CONFIG)
    terms.loss.backward()
    assert p.grad is not None
    assert abs(terms.loss.item()) <= 3 * a.abs().max().item() + 1e-6
    assert torch.isfinite(p.grad).all() and p.grad.abs().max().item() <= 3 * a.abs().max().item() / len(tokens) + 1e-6


def test_mismatch_metrics_follow_their_definitions():
    terms = policy_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.zeros(2), 2, CONFIG)
    d = [0.5, -1.0]
    assert terms.sums["mismatch/k1"].item() == pytest.approx(-sum(d))
    assert terms.sums["mismatch/k3"].item() == pytest.approx(sum(math.exp(x) - x - 1 for x in d), rel=1e-5)
    assert terms.maxima["mismatch/abs_max"].item() == pytest.approx(1.0)
