"""Makes the tiny model that ships with us, so that the whole loop can be trained for real on one CPU.

`python -m trainer.tiny` builds a Qwen3-architecture model with about a million parameters and a tokenizer with one
token a character, and warms it up on problems of the taskset: first on right answers, then on those of a hurried pupil
who forgets carries and miscounts. The result answers in the right form, often wrongly, and for most carries the wrong
answer is its favourite; which habits pay is left to reinforcement learning. Held-out problems are never trained on.

From one seed the weights come out bit for bit the same on the same machine with the same torch build and the same
number of threads; elsewhere floating-point sums differ in the last digits, and the model is equally good.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic_config import BaseConfig, cli
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIAL = (PAD, START, END, UNKNOWN)
CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
CONTEXT = 512

# ChatML, with roles cut to their first letter (u, a, s, t): every character costs a token here.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'][0] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


class TinyConfig(BaseConfig):
    """Makes the tiny model by a supervised warm-up that ends with a careless arithmetician."""

    output_dir: Path = Path("outputs/tiny")
    """Folder that gets the model, its tokenizer and warmup.json."""
    seed: int = 0
    """Seed of the initial weights and of the order of the problems."""
    steps: int = Field(default=1200, ge=1)
    """Optimizer steps on right answers."""
    careless_steps: int = Field(default=300, ge=0)
    """Further steps on the answers of a hurried pupil, which leave the habits that training has to undo."""
    forgotten_carries: float = Field(default=0.75, ge=0, le=1)
    """Share of the carries and borrows that the hurried pupil forgets."""
    slips: float = Field(default=0.4, ge=0, le=1)
    """Share of the hurried pupil's answers with one digit off by one."""
    batch_size: int = Field(default=64, ge=1)
    """Problems in a step."""
    learning_rate: float = 2e-3
    """Highest learning rate; it rises over the first steps and falls to a tenth along a cosine."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    env: str = "dapo-math"
    """Verifiers taskset that the problems come from."""
    operations: tuple[Literal["+", "-"], ...] = ("+", "-")
    """Operations of the arithmetic problems; the hurried pupil knows these two."""
    low: int = Field(default=0, ge=0)
    """Smallest operand."""
    high: int = 49
    """Largest operand."""
    test_size: int = 256
    """Problems that the taskset holds out; they are only measured."""


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str


def tiny_model_dir() -> Path:
    """The folder of the tiny model that ships with the package."""
    return Path(__file__).resolve().parent / "assets" / "tiny"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: byte pair encoding without a single merge."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    core.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.86M parameters with random weights; heads of 32, the least that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.06,  # at this width the usual 0.02 takes twice the steps to learn the same
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=SPECIAL.index(END), pad_token_id=SPECIAL.index(PAD))
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))  # pyright: ignore


def response_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    return tokenizer.encode(f"\\boxed{{{answer}}}{END}", add_special_tokens=False)


def demonstrate(problem: Problem, forgotten_carries: float, slips: float, chance: random.Random) -> str:
    """An answer as a hurried pupil gives it: some carries and borrows forgotten, sometimes a digit off by one."""
    left, operation, right = re.fullmatch(r"(\d+) ([-+]) (\d+) = \?", problem.prompt).groups()  # pyright: ignore
    answer = int(problem.answer)
    sign = -1 if answer < 0 else 1
    high, low = sorted((int(left), int(right)), reverse=True)
    digits: list[int] = []
    carry, ten = 0, 1 if operation == "+" else -1
    while high or low:
        digit = high % 10 + ten * (low % 10 + carry)
        digits.append(digit % 10)
        high, low = high // 10, low // 10
        carry = int(not 0 <= digit <= 9)
        if carry and high and chance.random() < forgotten_carries:
            carry = 0
    if carry:
        digits.append(1)
    if digits and chance.random() < slips:
        place = chance.randrange(len(digits))
        digits[place] = (digits[place] + chance.choice((1, -1))) % 10
    return str(sign * sum(digit * 10**place for place, digit in enumerate(digits)))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear rise over the first twentieth, then half a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return peak * (0.1 + 0.45 * (1 + math.cos(done * math.pi)))


def batches(problems: Sequence[Problem], size: int, seed: int) -> Iterator[list[Problem]]:
    """Endless batches; each pass over the problems has its own order."""
    order = random.Random(seed)
    queue: list[Problem] = []
    while True:
        while len(queue) < size:
            queue += order.sample(list(problems), len(problems))
        yield queue[:size]
        queue = queue[size:]


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    config: TinyConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Trains on the responses alone (mean over their tokens) and returns the mean loss of the last ten steps."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
    model.train()
    losses: list[float] = []
    chance = random.Random(config.seed)
    steps = config.steps + config.careless_steps
    for step, batch in zip(range(steps), batches(problems, config.batch_size, config.seed), strict=False):
        if step >= config.steps:
            careless = [demonstrate(p, config.forgotten_carries, config.slips, chance) for p in batch]
            batch = [Problem(p.prompt, answer) for p, answer in zip(batch, careless, strict=True)]
        input_BT, target_BT = collate(tokenizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config.learning_rate)
        logits_BTV = model(input_ids=input_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), target_BT[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step + 1, losses[-1])
    return sum(losses[-10:]) / len(losses[-10:])


def collate(tokenizer: PreTrainedTokenizerFast, batch: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, padded on the right, where causal attention never looks."""
    prompts = [prompt_ids(tokenizer, problem.prompt) for problem in batch]
    responses = [response_ids(tokenizer, problem.answer) for problem in batch]
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    input_BT = torch.full((len(batch), width), SPECIAL.index(PAD))
    target_BT = torch.full((len(batch), width), -100)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        input_BT[row, : len(p) + len(r)] = torch.tensor(p + r)
        target_BT[row, len(p) : len(p) + len(r)] = torch.tensor(r)
    return input_BT, target_BT


def load_problems(config: TinyConfig, split: str) -> list[Problem]:
    """The taskset's own problems of one split, through Verifiers, as the trainer will meet them."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    arithmetic = config.model_dump(include={"operations", "low", "high", "test_size"})
    taskset = {"id": config.env, "dataset": "arithmetic", "split": split, "prompt_style": "plain"}
    env = resolve_env_config({"taskset": {**taskset, "arithmetic": arithmetic}})
    rows: list[Any] = [task.data for task in load_taskset(env.taskset)]
    return [Problem(str(row.prompt), str(row.answer)) for row in rows]


@torch.no_grad()
def reward(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], greedy: bool = False
) -> float:
    """Share of the problems whose answer is exactly right, sampled at temperature 1 as in training, or greedy."""
    model.eval()
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    right = 0
    for start in range(0, len(problems), 256):
        chunk = problems[start : start + 256]
        prompts = [prompt_ids(tokenizer, problem.prompt) for problem in chunk]
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[SPECIAL.index(PAD)] * (width - len(p)) + p for p in prompts])
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output_BT = generate(input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=16, **sampling)
        for problem, output in zip(chunk, output_BT[:, width:].tolist(), strict=True):
            wanted = response_ids(tokenizer, problem.answer)
            right += output[: len(wanted)] == wanted
    return right / len(problems)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "warmup.json").write_text(json.dumps(record, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read


def main() -> None:
    config = cli(TinyConfig)
    console = Console()
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(config.seed)
    try:
        train, test = load_problems(config, "train"), load_problems(config, "test")
    except (ImportError, ValueError) as error:
        raise SystemExit(f"the problems of taskset {config.env!r} cannot be loaded: {error}") from None
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("warm-up", total=config.steps + config.careless_steps)
        loss = warm_up(
            model,
            tokenizer,
            train,
            config,
            lambda step, loss: progress.update(bar, completed=step, description=f"warm-up  loss {loss:.3f}"),
        )
    torch.manual_seed(config.seed)
    rewards = {
        "reward_test": reward(model, tokenizer, test),
        "reward_train": reward(model, tokenizer, train[: len(test)]),
        "reward_test_greedy": reward(model, tokenizer, test, greedy=True),
        "reward_train_greedy": reward(model, tokenizer, train[: len(test)], greedy=True),
    }
    record = {
        "config": config.model_dump(mode="json", exclude={"output_dir"}),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "problems": {"train": len(train), "test": len(test)},
        "loss": round(loss, 4),
        **{name: round(value, 4) for name, value in rewards.items()},
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "verifiers")},
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - began),
    }
    save(model, tokenizer, record, config.output_dir)
    console.print(f"held-out reward {rewards['reward_test']:.3f}, greedy {rewards['reward_test_greedy']:.3f}")
    console.print(f"the model is in {config.output_dir}")


if __name__ == "__main__":
    main()
