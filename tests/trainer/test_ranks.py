"""Several ranks are one learner: same gradients, same updates, same checkpoints as one rank alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bridge.protocol import Sample
from tests.trainer.teams import team_learner
from tests.trainer.test_learner import sampled_by
from trainer.config import GrpoConfig
from trainer.errors import UserError
from trainer.learner import Learner
from trainer.selection import Selection
from trainer.tiny import tiny_model_dir

# The moving average of the gradient after one step is 1 - 0.98 of it, so that a saved state tells the gradient.
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "max_mismatch": 1e6,
    "tokens_per_micro_batch": 24,
    "optimizer": {"betas": [0.98, 0.98], "max_grad_norm": 1e9},
}
ADVANTAGES = [1.0, -1.0, 0.5]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return sampled_by(AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family: grouped heads, a head of its own beside the embedding, no norms on heads."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder)
    return folder


def alone(model: Path | None = None, **settings: Any) -> Learner:
    return Learner(GrpoConfig(**{"dtype": "float32", **SETTINGS, **settings}), model or tiny_model_dir())


def update(learner: Learner, samples: list[Sample]) -> dict[str, float]:
    batch = learner.batch(Selection(samples, ADVANTAGES, []))
    assert batch is not None
    return learner.step(batch)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    states = learner.optimizer.state
    masters = learner.masters
    return {name: states[p]["exp_avg"] / 0.02 for name, p in zip(masters.names, masters.trained(), strict=True)}


@pytest.mark.parametrize(
    ("data", "tensor", "dtype", "bound"),
    [(2, 1, "float32", 1e-5), (1, 2, "float32", 1e-5), (2, 2, "float64", 1e-10)],
)
def test_the_gradient_is_the_same_on_any_layout_of_ranks(
    tmp_path: Path, samples: list[Sample], data: int, tensor: int, dtype: str, bound: float
):
    single = alone(dtype=dtype)
    expected = update(single, samples)
    with team_learner(tmp_path, tiny_model_dir(), data, tensor, **SETTINGS, dtype=dtype) as team:
        found = update(team, samples)
        team.write_state(tmp_path / "state")
        team.state_written()
    for name in expected:
        if "time/" not in name:
            assert found[name] == pytest.approx(expected[name], rel=10 * bound, abs=bound), name
    gathered = alone(dtype=dtype)
    gathered.load_state(tmp_path / "state")
    for name, gradient in gradients(single).items():
        assert gradient.norm() > 0
        assert (gradients(gathered)[name] - gradient).norm() < bound * gradient.norm(), name


def test_ranks_load_split_and_publish_any_dense_family(tmp_path: Path, llama: Path, samples: list[Sample]):
    single = alone(llama)
    with team_learner(tmp_path, llama, 1, 2, **SETTINGS, memory={"recompute": "full"}) as team:
        whole = team.weights()
        assert whole.keys() == dict(single.model.named_parameters()).keys()
        assert all(torch.equal(whole[name], p) for name, p in single.model.named_parameters())
        held = sum(p.to_local().numel() for p in team.model.parameters())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        assert held < 0.6 * sum(p.numel() for p in single.model.parameters())
        for _ in range(2):
            expected, found = update(single, samples), update(team, samples)
            for name in ("loss", "entropy", "grad_norm", "mismatch/k3", "ratio/max"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        addresses = {name: t.data_ptr() for name, t in whole.items()}
        assert {name: t.data_ptr() for name, t in team.weights().items()} == addresses, "published in place"
        assert not torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"])


def test_what_two_ranks_saved_one_rank_continues_and_the_other_way_round(tmp_path: Path, samples: list[Sample]):
    with team_learner(tmp_path / "two", tiny_model_dir(), 2, 1, **SETTINGS) as team:
        for _ in range(2):
            update(team, samples)
        team.write_state(tmp_path / "state_of_two")
        later = update(team, samples), team.weights()
    single = alone()
    single.load_state(tmp_path / "state_of_two")
    assert single.version == 2
    assert update(single, samples)["loss"] == pytest.approx(later[0]["loss"], rel=1e-5)
    assert all(torch.allclose(later[1][name], p, atol=1e-4) for name, p in single.model.named_parameters())
    single.write_state(tmp_path / "state_of_one")
    single.state_written()
    expected = update(single, samples)
    with team_learner(tmp_path / "again", tiny_model_dir(), 1, 2, **SETTINGS) as team:
        team.load_state(tmp_path / "state_of_one")
        assert team.version == 3
        assert update(team, samples)["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_bfloat16_ranks_keep_float32_shards_and_publish_bfloat16(tmp_path: Path, samples: list[Sample]):
    settings = {**SETTINGS, "dtype": "bfloat16", "learning_rate": 1e-6, "loss": {"kl_coef": 0.1}}
    with team_learner(tmp_path, tiny_model_dir(), 1, 2, **settings) as team:
        before = {name: p.detach().to_local().clone() for name, p in team.model.named_parameters()}  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        metrics = update(team, samples)
        assert metrics["mismatch/abs_mean"] < 0.1 and abs(metrics["kl/reference"]) < 1e-3
        assert team.skip()["update/skipped"] == 1.0
        now = {name: p.detach().to_local() for name, p in team.model.named_parameters()}  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        moved = sum(int((now[name] != before[name]).sum()) for name in before)
        assert moved > 0.8 * sum(t.numel() for t in before.values())
        assert {t.dtype for t in team.weights().values()} == {torch.bfloat16}


def test_a_rank_without_samples_of_its_own_takes_part(tmp_path: Path, samples: list[Sample]):
    single = alone()
    one = Selection(samples[:1], [1.0], [])
    with team_learner(tmp_path, tiny_model_dir(), 2, 1, **SETTINGS) as team:
        batches = [learner.batch(one) for learner in (single, team)]
        assert batches[0] and batches[1] and len(batches[1].micro_batches) == 2
        expected, found = single.step(batches[0]), team.step(batches[1])
        for name in ("loss", "grad_norm", "entropy", "mismatch/abs_max"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_a_model_that_cannot_be_split_so_is_refused_by_name(tmp_path: Path, llama: Path):
    with (
        pytest.raises(UserError, match="tensor_parallel_size = 3 does not divide the model's num_attention_heads = 8"),
        team_learner(tmp_path, llama, 1, 3, **SETTINGS),
    ):
        pass


def test_adapters_on_several_ranks_are_refused():
    with pytest.raises(ValueError, match="lora.rank with several ranks"):
        GrpoConfig.model_validate({"lora": {"rank": 4}, "parallelism": {"data_parallel_size": 2}})
