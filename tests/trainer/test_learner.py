from typing import Any

import pytest
import torch

from bridge.protocol import Sample
from tests.conftest import forward_logprobs
from tests.trainer.test_batch import sample
from trainer.batch import make_batch
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.learner import Learner
from trainer.tiny import tiny_model_dir


def learner(**settings: Any) -> Learner:
    return Learner(GrpoConfig(**{"dtype": "float32", **settings}), tiny_model_dir())


def sampled_by(model: Any, temperature: float = 1.0) -> list[Sample]:
    """Samples whose logprobs are those of `model`, as an exact engine would report them."""
    samples = []
    for number, (prompt, response) in enumerate([(5, 9), (3, 4), (8, 2)]):
        one = sample(prompt, response, 10 * number)
        ids = one.ids.tolist()
        expected = forward_logprobs(model, ids[:prompt], ids[prompt:], temperature)
        one.logprobs[prompt:] = expected.numpy()
        samples.append(Sample(**{**vars(one), "temperature": temperature}))
    return samples


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_trainer_and_an_exact_engine_agree_at_any_temperature(temperature: float):
    policy = learner(learning_rate=0.0)
    metrics = policy.step(make_batch(sampled_by(policy.model, temperature), [1.0, -1.0, 0.5], 10_000))
    assert metrics["mismatch/abs_max"] < 1e-4 and metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["entropy"] > 0


def test_the_wrong_temperature_stops_the_run_with_an_explanation():
    policy = learner()
    batch = make_batch([Sample(**{**vars(s), "temperature": 1.6}) for s in sampled_by(policy.model)], [1.0] * 3, 10_000)
    before = [p.clone() for p in policy.model.parameters()]
    with pytest.raises(UserError, match="exceeds max_mismatch = 0.02.*temperature"):
        policy.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert policy.version == 0


def test_the_update_does_not_depend_on_the_split_into_micro_batches():
    gradients = []
    for limit in (10_000, 1):
        policy = learner()
        policy.step(make_batch(sampled_by(policy.model), [1.0, -1.0, 0.5], limit))
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 0.1
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_an_update_makes_rewarded_tokens_likelier_and_punished_ones_less_likely():
    policy = learner(learning_rate=1e-4)
    samples = sampled_by(policy.model)
    policy.step(make_batch(samples, [1.0, -1.0, 0.0], 10_000))
    for one, sign in zip(samples, (1, -1), strict=False):
        ids, first = one.ids.tolist(), int(one.sampled.argmax())
        now = forward_logprobs(policy.model, ids[:first], ids[first:]).sum()
        assert sign * (float(now) - float(one.logprobs.sum())) > 0


def test_a_restored_learner_continues_bit_for_bit():
    straight, first = learner(learning_rate=1e-5), learner(learning_rate=1e-5)
    batch = make_batch(sampled_by(straight.model), [1.0, -1.0, 0.5], 10_000)
    straight.step(batch)
    first.step(batch)
    second = learner(learning_rate=1e-5)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state(first.state())
    straight.config.max_mismatch = second.config.max_mismatch = 10.0
    assert straight.step(batch)["loss"] == second.step(batch)["loss"]
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True))


def test_the_learning_rate_rises_linearly_and_stays():
    policy = learner(learning_rate=1e-4, optimizer={"warmup_steps": 3})
    rates = []
    for version in range(5):
        policy.version = version
        rates.append(policy._learning_rate())
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4])


def test_bfloat16_training_moves_the_weights_at_a_small_learning_rate_and_publishes_bfloat16():
    policy = learner(dtype="bfloat16", learning_rate=1e-6, max_mismatch=1.0)
    before = [p.detach().clone() for p in policy.model.parameters()]
    metrics = policy.step(make_batch(sampled_by(policy.model), [1.0, -1.0, 0.5], 10_000))
    moved = sum(int((a != b).sum()) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert moved > 0.9 * sum(p.numel() for p in before)
    assert metrics["mismatch/abs_mean"] < 0.1
    assert {tensor.dtype for _, tensor in policy.named_weights()} == {torch.bfloat16}
