import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import LossConfig
from trainer.loss import policy_loss


def plain_loss(p: Any, q: Any, a: Any, w: Any, config: LossConfig, s: Any = None) -> torch.Tensor:
    """The same in float64, one token at a time, as the papers write it.

    Clip: DAPO (2503.14476) eq. 8. Dual clip: 1912.09729 eq. 5. TIS: min(pi_old / pi_behaviour, C). IcePop: the weight
    where it lies in the band, else 0. KL: GRPO (2402.03300) eq. 4.
    """
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(p)):
        old = q[t] if config.old_policy == "bypass" else p[t].detach()
        ratio = torch.exp(p[t] - old)
        clipped = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
        term = torch.min(ratio * a[t], clipped * a[t])
        if a[t] < 0:
            term = torch.max(term, config.dual_clip * a[t])
        weight = 1.0
        if config.old_policy == "decoupled":
            weight = math.exp(float(p[t].detach() - q[t]))
            if config.correction == "tis":
                weight = min(weight, config.tis_cap)
            elif not config.icepop_low <= weight <= config.icepop_high:
                weight = 0.0
        total = total - w[t] * weight * term
        if s is not None:
            total = total + config.kl_coef * w[t] * (torch.exp(s[t] - p[t]) - (s[t] - p[t]) - 1)
    return total


VARIANTS = [
    {"old_policy": "bypass"},
    {"old_policy": "decoupled", "correction": "tis"},
    {"old_policy": "decoupled", "correction": "icepop"},
]


@pytest.mark.parametrize(("variant", "kl"), list(itertools.product(VARIANTS, [0.0, 0.1])))
def test_value_and_gradient_equal_a_plain_float64_form_of_the_papers(variant: dict[str, Any], kl: float):
    config = LossConfig(**variant, kl_coef=kl)
    generator = torch.Generator().manual_seed(0)
    q, noise, a, s = (torch.randn(400, generator=generator, dtype=torch.float64) for _ in range(4))
    w = torch.rand(400, generator=generator, dtype=torch.float64)
    p = q + 0.6 * noise
    ours, plain = p.clone().requires_grad_(), p.clone().requires_grad_()
    reference = p + 0.3 * s if kl else None
    terms = policy_loss(ours, q, a, w, config, reference)
    expected = plain_loss(plain, q, a, w, config, reference)
    terms.loss.backward()
    expected.backward()
    assert ours.grad is not None and plain.grad is not None and ours.grad.abs().max() > 0.1
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-12, atol=1e-14)


def loss_of(ratios: list[float], advantages: list[float], **settings: Any):
    p = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    count = len(ratios)
    weights = torch.full((count,), 1 / count)
    terms = policy_loss(p, torch.zeros(count), torch.tensor(advantages), weights, LossConfig(**settings))
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


@pytest.mark.parametrize(
    ("correction", "ratio", "weight"),
    [("tis", 5.0, 2.0), ("tis", 0.1, 0.1), ("icepop", 5.0, 0.0), ("icepop", 0.1, 0.0), ("icepop", 1.5, 1.5)],
)
def test_a_decoupled_gradient_is_the_plain_one_times_the_corrected_importance_weight(correction, ratio, weight):
    terms, grad = loss_of([ratio], [1.0], old_policy="decoupled", correction=correction)
    assert grad.item() == pytest.approx(-weight, rel=1e-6)
    assert bool(terms.sums["importance/corrected"]) is (weight != pytest.approx(ratio))


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3)), min_size=1, max_size=20))
def test_loss_and_gradient_are_bounded_for_any_logprobs(tokens):
    p, q, a = (torch.tensor(column) for column in zip(*tokens, strict=True))
    p.requires_grad_()
    terms = policy_loss(p, q, a, torch.full((len(tokens),), 1 / len(tokens)), LossConfig())
    terms.loss.backward()
    assert p.grad is not None
    assert abs(terms.loss.item()) <= 3 * a.abs().max().item() + 1e-6
    assert torch.isfinite(p.grad).all() and p.grad.abs().max().item() <= 3 * a.abs().max().item() / len(tokens) + 1e-6


def test_mismatch_metrics_follow_their_definitions():
    zeros = torch.zeros(2)
    terms = policy_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), zeros, zeros, LossConfig())
    d = [0.5, -1.0]
    assert terms.sums["mismatch/k1"].item() == pytest.approx(-sum(d))
    assert terms.sums["mismatch/k3"].item() == pytest.approx(sum(math.exp(x) - x - 1 for x in d), rel=1e-5)
    assert terms.maxima["mismatch/abs_max"].item() == pytest.approx(1.0)
