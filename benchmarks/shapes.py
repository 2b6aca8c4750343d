"""The reference workload: Qwen3-4B's shape, and 32 completions with the lengths of the published run."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from bridge.protocol import Sample
from trainer.tiny import tiny_model_dir

PROMPT = 150
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}


def shape_folder(folder: Path) -> Path:
    """A model folder of the Qwen3-4B shape without weights; the tokenizer only has to load."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tiny_model_dir().iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return folder


def reference_lengths(count: int = 32, longest: int = 2048) -> list[int]:
    """Completion lengths, log-normal and cut at the limit: mean 843 tokens, 6% at the limit (100 at least)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.clamp(torch.exp(torch.randn(count, generator=generator) * 0.75 + 6.5), 100, longest).long()
    return lengths[torch.randperm(count, generator=generator)].tolist()


def random_samples(lengths: list[int], vocabulary: int, prompt: int = PROMPT) -> list[Sample]:
    """Sequences of random tokens with behaviour logprobs near those of an untrained model."""
    generator = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        sampled = np.arange(prompt + length) >= prompt
        logprobs = np.where(sampled, -np.log(vocabulary) + generator.normal(0, 0.1, prompt + length), 0.0)
        samples.append(
            Sample(
                session=f"s{number}",
                ids=generator.integers(4, vocabulary, prompt + length).astype(np.int32),
                sampled=sampled,
                logprobs=logprobs.astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                temperature=1.0,
                finish_reason="stop",
            )
        )
    return samples
