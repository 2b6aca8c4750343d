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

    kind: Literal["mean", "mean_std", "rloo"] = "mean"
    """`mean`: reward minus the group's mean (Dr. GRPO); `mean_std`: that divided by the group's population standard
    deviation plus 1e-6 (GRPO); `rloo`: reward minus the mean of the others (leave one out)."""


class ZeroSpreadConfig(Settings):
    """Groups whose rewards are all equal teach nothing."""

    rule: Literal["retain", "drop", "resample"] = "retain"
    """`retain`: their tokens have no gradient but count in the mean; `drop`: they do not count; `resample`: other
    prompts take their place."""
    max_rounds: int = Field(default=3, ge=1)
    """How often a step samples replacements (`resample`) before it takes groups as they are."""


class TruncationConfig(Settings):
    """Answers that the length limit cut off."""

    rule: Literal["keep", "mask", "penalty"] = "keep"
    """`keep`: trained like all others; `mask`: not trained and not counted, their reward stays in the group's mean;
    `penalty`: long answers lose reward gradually, before the limit cuts them off (DAPO)."""
    penalty_buffer: int = Field(default=512, ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """The penalty at the limit."""


class LossConfig(Settings):
    """The policy loss: clipped, with a dual clip."""

    kind: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """The normalization. `dapo`: mean over all tokens of the step; `grpo`: mean over sequences of their token means;
    `dr_grpo`: sum over tokens, divided by sequences times `sampling.max_tokens`."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: float = Field(default=3.0, gt=1)
    """With a negative advantage the ratio counts at most this much."""
    old_policy: Literal["bypass", "decoupled"] = "bypass"
    """What the ratio is taken against. `bypass`: the engine's logprobs, so that clipping also bounds the mismatch;
    `decoupled`: the trainer's own, and `correction` weighs each token for the engine's."""
    correction: Literal["tis", "icepop"] = "tis"
    """With `decoupled`: importance weights cut at `tis_cap`, or tokens left out whose weight is outside the band."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight (`tis`)."""
    icepop_low: float = Field(default=0.5, ge=0)
    """Lower end of the band (`icepop`)."""
    icepop_high: float = Field(default=2.0, gt=0)
    """Upper end of the band (`icepop`)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of a KL term that holds the policy near the model that the run began with; 0 keeps no second model."""


class OptimizerConfig(Settings):
    """AdamW and its schedule."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the two moments in 8 bits (needs torchao)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of the two moment estimates."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its value."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """What follows the rise: `cosine` falls over all remaining steps, `wsd` stays and falls over the last ones."""
    decay_steps: int = Field(default=0, ge=0)
    """Steps of the fall (`wsd`)."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end (`cosine`, `wsd`)."""


class MemoryConfig(Settings):
    """Memory against time."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: compute a layer again in the backward pass instead of keeping what it computed; every
    second layer (`selective`) or all of them."""


class ParallelismConfig(Settings):
    """How many ranks (one GPU each, or CPU processes) train together: `data_parallel_size x tensor_parallel_size`."""

    data_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which samples, weights, gradients and optimizer states are divided (FSDP2)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which every matrix product is divided; must divide the model's heads and vocabulary."""

    @property
    def ranks(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


class LoraConfig(Settings):
    """Low-rank adapters instead of all weights (arXiv 2106.09685)."""

    rank: int = Field(default=0, ge=0, le=512)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(default=32, ge=1)
    """The adapters' output is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get one."""


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
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes weights up from `seed`, in trainer and engine alike: for measuring a shape without its weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Computation type of trainer and engine. The trainer's own weights and optimizer states are float32 either way.
    `float64` is for checks of the learner alone; no engine computes in it."""
    max_steps: int = Field(default=100, ge=0)
    """Optimizer updates."""
    prompts_per_step: int = Field(default=4, ge=1)
    """Groups per step."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Episodes per group. A group's mean reward is its baseline, so one sample would learn nothing."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate, see `optimizer.schedule`."""
    max_off_policy_steps: int = Field(default=0, ge=0, le=0)
    """Policy versions that a sample may lag behind the trainer. 0 (synchronous) is what this version can do."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    zero_spread: ZeroSpreadConfig = ZeroSpreadConfig()
    truncation: TruncationConfig = TruncationConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    lora: LoraConfig = LoraConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    packing: bool | None = None
    """Sequences one after the other in one row, without padding. Unset: on a GPU, where attention knows their
    boundaries; on a CPU padded rows cost less."""
    compile: bool | None = None
    """Compile the decoder's layers. Unset: on a GPU."""
    tokens_per_micro_batch: int = Field(default=8192, ge=1)
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
        if self.truncation.rule == "penalty" and self.truncation.penalty_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"truncation.penalty_buffer = {self.truncation.penalty_buffer} is longer than sampling.max_tokens = "
                f"{self.sampling.max_tokens}: every answer would lose reward"
            )
        if self.lora.rank and self.loss.kl_coef:
            raise ValueError("loss.kl_coef with lora.rank: a low-rank policy has no reference model here; set one to 0")
        if self.lora.rank and self.parallelism.ranks > 1:
            raise ValueError(
                "lora.rank with several ranks: adapters are trained on one; set parallelism.data_parallel_size and "
                "tensor_parallel_size to 1"
            )
        return self
