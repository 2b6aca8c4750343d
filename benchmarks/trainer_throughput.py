"""Tokens a second of one training step: the real loss, its metrics, backward, AdamW; against TRL's in the same run.

    python benchmarks/trainer_throughput.py [--save]     # one GPU: Qwen3-4B shape, the reference's 32 completions
    python benchmarks/trainer_throughput.py --tiny       # a CPU: the shipped model against a plain transformers loop

`tokens_per_s` counts prompts and responses over forward and backward; `response_tokens_per_s` counts responses over
forward, backward and optimizer, as the torchtitan run does.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import record
from shapes import PROMPT, random_samples, reference_lengths, shape_folder
from transformers import AutoModelForCausalLM

from trainer.config import GrpoConfig
from trainer.learner import Learner
from trainer.selection import Selection
from trainer.tiny import tiny_model_dir

H200_BF16_FLOPS = 989e12


def ours(config: GrpoConfig, folder: Path, lengths: list[int], repeats: int, profile: Path | None) -> dict[str, float]:
    learner = Learner(config, folder)
    shape = learner.model.config
    samples = random_samples(lengths, shape.vocab_size, PROMPT if len(lengths) == 32 and max(lengths) > 100 else 8)
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    batch = learner.batch(Selection(samples, advantages, []))
    assert batch is not None
    steps = []
    for number in range(repeats + 2):
        if number == 2 and learner.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps.append(learner.step(batch))
        print({name: round(value, 4) for name, value in steps[-1].items() if "time" in name or name == "loss"})
    if profile:
        with torch.profiler.profile() as profiler:
            learner.step(batch)
        profile.write_text(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
    passes = statistics.median(step["time/forward_backward"] for step in steps[2:])
    optimizer = statistics.median(step["time/optimizer"] for step in steps[2:])
    head = shape.vocab_size * shape.hidden_size
    layers = sum(p.numel() for p in learner.model.parameters()) - head
    heads = shape.num_attention_heads * getattr(shape, "head_dim", shape.hidden_size // shape.num_attention_heads)
    squares = sum(len(sample.ids) ** 2 for sample in samples)
    flops = 6 * (layers * batch.total_tokens + head * batch.trained_tokens)
    flops += 6 * shape.num_hidden_layers * heads * squares
    peak = torch.cuda.max_memory_allocated() / 1e9 if learner.device.type == "cuda" else 0.0
    return {
        "tokens": batch.total_tokens,
        "response_tokens": batch.trained_tokens,
        "forward_backward_s": passes,
        "optimizer_s": optimizer,
        "tokens_per_s": batch.total_tokens / passes,
        "response_tokens_per_s": batch.trained_tokens / (passes + optimizer),
        "mfu": flops / passes / H200_BF16_FLOPS,
        "peak_gb": peak,
    }


def trl(folder: Path, lengths: list[int], repeats: int) -> dict[str, float]:
    """TRL's GRPOTrainer with its defaults (gradient checkpointing, 8 sequences at a time, padded)."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    with torch.device("cuda"):
        shape = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_generations=8,
        gradient_accumulation_steps=4,
        max_completion_length=2048,
        bf16=True,
        report_to=[],
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=True,
        learning_rate=1e-6,
        temperature=1.0,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 64}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model.config.use_cache = False
    trainer.current_gradient_accumulation_steps = 4
    seconds = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.monotonic()
        for first in range(0, len(lengths), 8):
            counts = torch.tensor(lengths[first : first + 8])
            width = int(counts.max())
            ids = torch.randint(4, shape.vocab_size, (8, width), device="cuda")
            inputs = {
                "prompt_ids": torch.randint(4, shape.vocab_size, (8, PROMPT), device="cuda"),
                "prompt_mask": torch.ones(8, PROMPT, dtype=torch.long, device="cuda"),
                "completion_ids": ids,
                "completion_mask": (torch.arange(width)[None] < counts[:, None]).long().cuda(),
                "advantages": torch.randn(8, device="cuda"),
                "num_items_in_batch": torch.tensor(float(sum(lengths)), device="cuda"),
            }
            with torch.autocast("cuda", torch.bfloat16):
                loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
        trainer.model.zero_grad()
    total = sum(lengths) + PROMPT * len(lengths)
    passes = statistics.median(seconds[1:])
    return {"trl_tokens_per_s": total / passes, "trl_peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def plain(lengths: list[int], repeats: int) -> dict[str, float]:
    """The shipped model in a loop as one would write it: one padded batch, all logits, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32).train()
    samples = random_samples(lengths, model.config.vocab_size, 8)
    width = max(len(sample.ids) for sample in samples)
    ids, mask = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width, dtype=torch.bool)
    old = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.from_numpy(sample.ids).long()
        mask[row, : len(sample.ids)] = torch.from_numpy(sample.sampled)
        old[row, : len(sample.ids)] = torch.from_numpy(sample.logprobs)
    advantages = torch.randn(len(samples), 1, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seconds = []
    for _ in range(repeats + 1):
        start = time.monotonic()
        optimizer.zero_grad()
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = torch.exp(logprobs - old[:, 1:])
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (-(objective * mask[:, 1:]).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.monotonic() - start)
    return {"plain_s": statistics.median(seconds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the shipped model on the CPU")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, after two that are not")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--profile", type=Path, help="write where the time of one step goes to this file")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args()
    common: dict[str, Any] = {"max_mismatch": 1e9, "learning_rate": 1e-6}
    if args.tiny:
        lengths = [int(length) for length in torch.randint(4, 24, (128,), generator=torch.Generator().manual_seed(0))]
        config = GrpoConfig(dtype="float32", tokens_per_micro_batch=8192, **common)
        results = ours(config, tiny_model_dir(), lengths, args.repeats, args.profile)
        results |= plain(lengths, args.repeats)
        results["vs_plain"] = results["plain_s"] / (results["forward_backward_s"] + results["optimizer_s"])
    else:
        folder, lengths = shape_folder(Path(tempfile.mkdtemp(), "qwen3-4b")), reference_lengths()
        config = GrpoConfig(load_format="dummy", tokens_per_micro_batch=args.pack, **common)
        results = ours(config, folder, lengths, args.repeats, args.profile)
        gc.collect()
        torch.cuda.empty_cache()
        results |= trl(folder, lengths, args.repeats)
        results["vs_trl"] = results["tokens_per_s"] / results["trl_tokens_per_s"]
    record("trainer_throughput", results, ["torch", "transformers", "trl"], args.save)


if __name__ == "__main__":
    main()
