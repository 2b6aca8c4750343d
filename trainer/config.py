"""The settings of a training run: one field, one docstring; `--help` shows them all."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bridge.config import BridgeConfig, Settings


class SamplingConfig(Settings):
    """How the policy is sampled, in training and validation alike."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature. The trainer divides its logits by the same value."""
    top_p: float = 1.0
    """Must stay 1: a truncated support would make the trainer's probabilities differ from the sampler's."""
    top_k: int = -1
    """Must stay -1 (off), for the same reason."""
    min_p: float = 0.0
    """Must stay 0 (off), for the same reason."""
    max_tokens: int = Field(default=2048, ge=1)
    """Longest completion in tokens."""
    seed: int | None = None
    """Seeds each request by (seed, purpose, step, prompt, sample): the run repeats token for token. Unset, unseeded."""

    @model_validator(mode="after")
    def _whole_support(self) -> Self:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"sampling.{name} = {getattr(self, name)} cannot be trained on: it cuts tokens out of the sampling "
                    f"distribution, so the trainer's probabilities would not be the sampler's. Set it to {off}."
                )
        return self


class AdvantageConfig(Settings):
    """How rewards of a group become advantages."""

    divide_by_std: bool = False
    """Divide by the group's population standard deviation plus 1e-6 (GRPO); off, reward minus mean (Dr. GRPO)."""


class LossConfig(Settings):
    """The policy loss (DAPO's token mean with a dual clip)."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: float = Field(default=3.0, gt=1)
    """With a negative advantage the ratio counts at most this much."""


class OptimizerConfig(Settings):
    """AdamW."""

    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the two moment estimates."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its value; constant afterwards."""


class ValidationConfig(Settings):
    """Held-out problems, sampled as in training."""

    interval: int = Field(default=0, ge=0)
    """Validate every so many steps, and before the first and after the last; 0 turns validation off."""
    problems: int = Field(default=256, ge=1)
    """How many problems, the first of the validation taskset in its own order."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers per problem."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Taskset settings that differ from training, such as `split = "test"`."""


class CheckpointConfig(Settings):
    """What is kept on disk for resuming and for use elsewhere."""

    interval: int = Field(default=50, ge=0)
    """Save every so many steps, and at the end; 0 saves at the end alone."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay."""


class RunBridgeConfig(BridgeConfig):
    """The bridge of a run: as `python -m bridge serve`, on a free port."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one, so that runs do not meet."""


class GrpoConfig(Settings):
    """GRPO on a Verifiers environment, with vLLM behind the bridge."""

    env: str = "dapo-math"
    """Verifiers taskset to train on: an installed environment package."""
    env_config: Path = Path("verifiers_env.toml")
    """The environment server's file (taskset, harness, runtime, pool)."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Taskset settings on top of those of `env_config`, such as `dataset` or `prompt_style`."""
    self_check: Literal["stop", "drop", "off"] = "stop"
    """Before anything starts, each task's own `validate()` must accept its known answer. When one does not: `stop` with
    the list, `drop` those tasks and train on the rest, or `off`: do not check."""
    model: str = "tiny"
    """Folder in Hugging Face format, hub id, or `tiny`: the model that ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Computation type of trainer and engine. The trainer's own weights and optimizer states are float32 either way."""
    max_steps: int = Field(default=100, ge=0)
    """Optimizer updates."""
    prompts_per_step: int = Field(default=4, ge=1)
    """Groups per step."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Episodes per group. A group's mean reward is its baseline, so one sample would learn nothing."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate; constant after warm-up."""
    max_off_policy_steps: int = Field(default=0, ge=0, le=0)
    """Policy versions that a sample may lag behind the trainer. 0 (synchronous) is what this version can do."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    tokens_per_micro_batch: int = Field(default=16_384, ge=1)
    """Tokens (padding included) of one forward and backward pass; a longer sample gets a pass of its own."""
    max_mismatch: float = Field(default=0.02, gt=0)
    """Stop when k3 between the engine's and the trainer's logprobs of the same weights exceeds this: wrong weights,
    template or temperature. bfloat16 alone gives about 0.001."""
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bridge: RunBridgeConfig = RunBridgeConfig()
    """The bridge and its engine. `bridge.engine.model` and `.dtype` follow `model` and `dtype`."""
    output_dir: Path = Path("outputs")
    """Where run folders go."""
    run_name: str | None = None
    """Name of the run folder; unset, environment, model and time."""
    resume: bool = False
    """Go on from the newest complete checkpoint of `run_name` (or of the newest run in `output_dir`)."""
    seed: int = 0
    """Order of problems and of everything random in the trainer."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the trainer; torch's default where unset."""
    progress: Literal["auto", "rich", "plain"] = "auto"
    """Live display on a terminal (`rich`), one line a step elsewhere (`plain`)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.bridge.engine.max_model_len and self.sampling.max_tokens >= self.bridge.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"bridge.engine.max_model_len = {self.bridge.engine.max_model_len}"
            )
        return self
