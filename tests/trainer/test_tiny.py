import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from trainer.tiny import (
    CHARACTERS,
    END,
    PAD,
    START,
    Problem,
    TinyConfig,
    batches,
    build_model,
    build_tokenizer,
    demonstrate,
    load_problems,
    prompt_ids,
    response_ids,
    reward,
    save,
    tiny_model_dir,
    warm_up,
)

TOKENIZER = AutoTokenizer.from_pretrained(tiny_model_dir())
SUMS = [Problem(f"{a} + {b} = ?", str(a + b)) for a in range(12) for b in range(12)]


@given(st.text(alphabet=CHARACTERS))
def test_any_printable_ascii_text_survives_the_tokenizer(text: str):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_character_is_one_token():
    assert len(TOKENIZER.encode(CHARACTERS)) == len(CHARACTERS)
    assert len(TOKENIZER) == len(CHARACTERS) + 4


def test_a_character_outside_ascii_is_unknown_and_not_an_error():
    assert TOKENIZER.encode("é") == [TOKENIZER.unk_token_id]


def test_the_shipped_tokenizer_is_the_built_one():
    text = f"{START}u\n12 + 34 = ?{END}\n"
    assert TOKENIZER.encode(text) == build_tokenizer().encode(text)
    assert TOKENIZER.chat_template == build_tokenizer().chat_template


def test_the_chat_template_is_chatml_with_one_letter_roles():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1 = ?"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>s\nAdd.<|im_end|>\n<|im_start|>u\n1 + 1 = ?<|im_end|>\n<|im_start|>a\n"


def test_the_default_renderer_gives_the_same_prompt_and_stops_at_the_end_of_the_turn():
    renderers = pytest.importorskip("renderers")
    renderer = renderers.create_renderer(TOKENIZER, renderers.DefaultRendererConfig())
    ids = renderer.render_ids([{"role": "user", "content": "12 + 34 = ?"}], add_generation_prompt=True)
    assert ids == prompt_ids(TOKENIZER, "12 + 34 = ?")
    assert TOKENIZER.convert_tokens_to_ids(END) in renderer.get_stop_token_ids()
    assert renderer.parse_response(response_ids(TOKENIZER, "46")).content == r"\boxed{46}"


def test_the_shipped_model_loads_and_ends_its_turn_like_the_tokenizer():
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    end, pad = TOKENIZER.convert_tokens_to_ids([END, PAD])
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings == TOKENIZER.model_max_length == 512
    assert model.config.eos_token_id == model.generation_config.eos_token_id == TOKENIZER.eos_token_id == end
    assert model.config.pad_token_id == model.generation_config.pad_token_id == TOKENIZER.pad_token_id == pad
    assert model.config.vocab_size == len(TOKENIZER)


def test_the_shipped_weights_are_small_and_tied():
    from safetensors import safe_open

    file = tiny_model_dir() / "model.safetensors"
    assert file.stat().st_size < 5_000_000
    with safe_open(file, framework="pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (safe_open is no mapping)
    model = Qwen3ForCausalLM.from_pretrained(tiny_model_dir())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_shipped_model_was_made_with_the_defaults_and_is_mediocre():
    record = json.loads((tiny_model_dir() / "warmup.json").read_text())
    assert record["config"] == TinyConfig().model_dump(mode="json", exclude={"output_dir"})
    assert 0.3 < record["reward_test"] < 0.5


def test_the_same_seed_gives_the_same_weights():
    config = TinyConfig(steps=1, careless_steps=1, batch_size=16)
    first, second, other = (build_model(seed) for seed in (0, 0, 1))
    for model in (first, second, other):
        warm_up(model, build_tokenizer(), SUMS, config)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_saved_model_loads_with_the_same_weights(tmp_path):
    model = build_model(3)
    save(model, build_tokenizer(), {"seed": 3}, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_each_pass_sees_every_problem_once():
    stream = batches(SUMS, 48, seed=0)
    for _ in range(3):
        seen = [problem for _ in range(3) for problem in next(stream)]
        assert sorted(p.prompt for p in seen) == sorted(p.prompt for p in SUMS)


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-"))
def test_a_demonstration_that_forgets_nothing_is_right(left: int, right: int, operation: str):
    answer = str(left + right if operation == "+" else left - right)
    assert demonstrate(Problem(f"{left} {operation} {right} = ?", answer), 0, 0, random.Random(0)) == answer


@pytest.mark.parametrize(
    ("prompt", "answer", "forgotten"),
    [
        ("27 + 35 = ?", "62", "52"),
        ("52 - 27 = ?", "25", "35"),
        ("27 - 52 = ?", "-25", "-35"),
        ("21 + 34 = ?", "55", "55"),
    ],
)
def test_a_forgotten_carry_is_ten_off(prompt: str, answer: str, forgotten: str):
    assert demonstrate(Problem(prompt, answer), 1, 0, random.Random(0)) == forgotten


def test_the_warm_up_never_sees_a_held_out_problem_even_the_other_way_round():
    pytest.importorskip("dapo_math")
    train, test = load_problems(TinyConfig(), "train"), load_problems(TinyConfig(), "test")

    def key(problem: Problem) -> tuple[str, ...]:
        left, operation, right, *_ = problem.prompt.split()
        return (operation, *sorted((left, right)))

    assert len(test) == TinyConfig().test_size >= 128
    assert not {key(p) for p in train} & {key(p) for p in test}


def test_the_shipped_reward_is_measured_again_within_its_noise():
    pytest.importorskip("dapo_math")
    record = json.loads((tiny_model_dir() / "warmup.json").read_text())
    model = Qwen3ForCausalLM.from_pretrained(tiny_model_dir())
    torch.manual_seed(1)
    measured = reward(model, build_tokenizer(), load_problems(TinyConfig(), "test"))
    assert abs(measured - record["reward_test"]) < 0.12
