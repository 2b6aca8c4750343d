from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from bridge.protocol import Sample
from tests.conftest import forward_logprobs
from tests.trainer.test_batch import sample
from trainer.batch import make_batch
from trainer.checkpoint import Checkpoints, load_learner_state
from trainer.config import GrpoConfig, LossConfig, OptimizerConfig
from trainer.errors import UserError
from trainer.learner import Learner
from trainer.loss import policy_loss
from trainer.memory import check_memory, estimate
from trainer.model import Policy, load_model
from trainer.optimizer import learning_rate
from trainer.selection import Selection
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


def test_a_restored_learner_continues_bit_for_bit(tmp_path: Path):
    straight, first = learner(learning_rate=1e-5), learner(learning_rate=1e-5)
    batch = make_batch(sampled_by(straight.model), [1.0, -1.0, 0.5], 10_000)
    straight.step(batch)
    first.step(batch)
    second = learner(learning_rate=1e-5)
    first.write_state(tmp_path)
    first.state_written()
    second.load_state(tmp_path)
    straight.config.max_mismatch = second.config.max_mismatch = 10.0
    assert straight.step(batch)["loss"] == second.step(batch)["loss"]
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_the_same_for_any_split_packing_and_order_in_float64(packing: bool):
    model = load_model(tiny_model_dir(), torch.device("cpu"), torch.float64)
    samples, advantages = sampled_by(model), [1.0, -1.0, 0.5]

    def gradient(order: list[int], limit: int, packed: bool, kind: Any) -> torch.Tensor:
        policy = Policy(model)
        model.zero_grad()
        batch = make_batch([samples[i] for i in order], [advantages[i] for i in order], limit, kind=kind, packed=packed)
        for micro in batch.micro_batches:
            logprobs_T, _ = policy(micro)
            policy_loss(
                logprobs_T, micro.behaviour_T, micro.advantages_T, micro.weights_T, LossConfig()
            ).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for kind in ("dapo", "grpo", "dr_grpo"):
        expected = gradient([0, 1, 2], 10_000, False, kind)
        assert expected.dtype == torch.float64 and expected.norm() > 1e-3
        for order, limit in (([2, 0, 1], 10_000), ([1, 2, 0], 1), ([0, 2, 1], 18)):
            found = gradient(order, limit, packing, kind)
            assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


def test_packed_and_padded_gradients_agree_in_float32():
    gradients = []
    for settings in ({"packing": True}, {"packing": False}, {"packing": True, "tokens_per_micro_batch": 20}):
        policy = learner(**settings)
        selection = Selection(sampled_by(policy.model), [1.0, -1.0, 0.5], [])
        batch = policy.batch(selection)
        assert batch is not None
        policy.step(batch)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.masters.trained() if p.grad is not None]))
    for other in gradients[1:]:
        assert (gradients[0] - other).norm() < 1e-5 * gradients[0].norm()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_no_gradient(recompute: str):
    gradients = []
    for choice in ("none", recompute):
        policy = learner(memory={"recompute": choice})
        policy.step(make_batch(sampled_by(policy.model), [1.0, -1.0, 0.5], 10_000))
        gradients.append(torch.cat([p.grad.flatten() for p in policy.masters.trained() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7)


def test_a_kl_term_pulls_towards_the_model_that_the_run_began_with():
    policy = learner(loss={"kl_coef": 1.0}, learning_rate=0.0, max_mismatch=10.0)
    batch = make_batch(sampled_by(policy.model), [0.0, 0.0, 0.0], 10_000)
    assert abs(policy.step(batch)["kl/reference"]) < 1e-6
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    metrics = policy.step(batch)
    assert metrics["kl/reference"] > 1e-4 and metrics["grad_norm"] > 0


def test_a_step_with_nothing_to_learn_from_is_skipped_under_the_next_version():
    policy = learner()
    assert policy.batch(Selection([], [], [])) is None
    before = [p.clone() for p in policy.model.parameters()]
    assert policy.skip()["update/skipped"] == 1.0 and policy.version == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


def test_adapters_alone_are_trained_and_what_is_exported_is_the_whole_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    policy = learner(lora={"rank": 4}, learning_rate=1e-3, max_mismatch=1e6)
    base = {name: p.clone() for name, p in policy.model.named_parameters() if "lora_" not in name}
    batch = make_batch(sampled_by(load_model(tiny_model_dir(), torch.device("cpu"))), [1.0, -1.0, 0.5], 10_000)
    first = policy.step(batch)
    assert first["mismatch/abs_max"] < 1e-4, "fresh adapters have no effect"
    policy.step(batch)
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    checkpoints = Checkpoints(tmp_path, 2, tiny_model_dir())
    checkpoints.begin(2, policy, {})
    checkpoints.finish()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000002", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (exported(ids).logits - policy.model(ids).logits).abs().max() < 1e-4
    restored = learner(lora={"rank": 4}, learning_rate=1e-3, max_mismatch=1e6)
    load_learner_state(tmp_path / "step_000002", restored)
    assert restored.step(batch)["loss"] == policy.step(batch)["loss"]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"schedule": "cosine"}, [1, 0.95, 0.81, 0.61, 0.39, 0.19, 0.05, 0]),
        ({"schedule": "cosine", "warmup_steps": 1, "final_share": 0.5}, [0.5, 1, 0.97, 0.88, 0.75, 0.63, 0.53, 0.5]),
        ({"schedule": "wsd", "decay_steps": 4}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_the_learning_rate_follows_its_schedule(settings: dict[str, Any], rates: list[float]):
    config = OptimizerConfig(**settings)
    found = [learning_rate(config, 1.0, step, 8) for step in range(1, 9)]
    assert found == pytest.approx(rates, abs=0.01)


def test_a_model_that_cannot_fit_is_refused_with_what_would_help():
    config = GrpoConfig(dtype="bfloat16", tokens_per_micro_batch=16_384)
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    )
    need = estimate(shape, 4_022_000_000, config)
    assert 105e9 < need.total < 135e9, "113 GB were measured on an H200"
    check_memory(need, 141e9, config)
    with pytest.raises(UserError, match=r"activations.*80 GiB are free.*--memory.recompute selective"):
        check_memory(need, 80 * 2**30, config)


def test_bfloat16_training_moves_the_weights_at_a_small_learning_rate_and_publishes_bfloat16():
    policy = learner(dtype="bfloat16", learning_rate=1e-6, max_mismatch=1.0)
    before = [p.detach().clone() for p in policy.masters.trained()]
    samples = sampled_by(load_model(tiny_model_dir(), torch.device("cpu")))
    metrics = policy.step(make_batch(samples, [1.0, -1.0, 0.5], 10_000))
    moved = sum(int((a != b).sum()) for a, b in zip(before, policy.masters.trained(), strict=True))
    assert moved > 0.9 * sum(p.numel() for p in before)
    assert metrics["mismatch/abs_mean"] < 0.1
    assert {tensor.dtype for tensor in policy.weights().values()} == {torch.bfloat16}
